#include "cli/commands/export.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <pwd.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands/commands.h"
#include "cli/device/snapshot_device.h"
#include "cli/process/environment.h"
#include "cli/reports/bundle.h"
#include "cli/reports/reports.h"
#include "cli/reports/run_work.h"
#include "cli/terminal/help.h"
#include "cli/terminal/terminal.h"
#include "profiler/error.h"
#include "profiler/export/html.h"
#include "profiler/export/perfetto.h"
#include "profiler/export/picture.h"
#include "profiler/export/tables.h"
#include "profiler/export/to_snapshot.h"
#include "profiler/report/json/json.h"

namespace oomdiag {
namespace {

struct ExportOptions {
  std::string path, to, output, at;
  SnapshotDevice gpu;
  bool redact = false;
};

// Of a redacted report no name may come from the trace; the step's categories are none.
std::vector<GpuPicture> draw(const Explained& from) {
  std::vector<GpuPicture> gpus;
  for (size_t i = 0; i < from.report.devices.size(); ++i) {
    const bool has_history = from.trace != nullptr && i < from.history.devices.size();
    if (has_history && !from.is_redacted) {
      gpus.push_back(draw_gpu(from.history.devices[i]));
      continue;
    }
    gpus.push_back(draw_gpu(from.report.devices[i]));
    if (has_history) gpus.back().step = draw_step(from.history.devices[i].step_allocations);
  }
  return gpus;
}

/// One of the formats: its name, the ending of its files, and what makes it.
struct Format {
  const char* name;
  const char* ending;
  std::string (*make)(const Explained& from);
  bool shows_trace = false;  ///< its names, too: it cannot be redacted
  bool is_private = false;   ///< only its owner may read the file, as a trace
};

std::string make_html(const Explained& from) { return to_html(from.report, draw(from)); }

std::string make_folded(const Explained& from) {
  const std::vector<GpuPicture> gpus = draw(from);
  return from.report.main_device < gpus.size() ? to_folded(gpus[from.report.main_device].owners) : "";
}

std::string make_snapshot(const Explained& from) {
  const SnapshotTime time = from.at.empty() ? SnapshotTime::end : SnapshotTime::described;
  if (from.trace != nullptr) return to_snapshot(*from.trace, from.history, time);
  throw Error(ErrorKind::usage, "--to snapshot needs the trace of one process, and there is a report only",
              "give the trace, or the folder of one rank");
}

/// The operators of a metered run, with the rates of `work_device`.
std::string make_work(const Explained& from) {
  if (from.trace == nullptr) {
    throw Error(ErrorKind::usage, "--to work needs the folder of one process that was metered",
                "oomdiag run --meter -- PROGRAM");
  }
  return work_to_csv(from.file, *from.trace, from.report, from.work_device);
}

/// Of a job each process has its tracks, on the clock of the host.
std::string make_perfetto(const Explained& from) {
  PerfettoTimeline timeline;
  if (from.processes.empty()) timeline.add(from.report, from.trace.get(), from.history);
  for (const std::filesystem::path& trace : from.processes) {
    const Explained process = load_explained(trace);
    timeline.add(process.report, process.trace.get(), process.history);
  }
  return std::move(timeline).finish();
}

/// Redacted, of the report alone.
std::string pack_run(const Explained& from) {
  if (from.is_redacted) return make_bundle_of_report(to_json(from.report));
  if (std::filesystem::is_directory(from.source)) return make_bundle(from.source);
  throw Error(ErrorKind::usage, fmt::format("--to bundle takes a run folder, and '{}' is none", from.source.string()),
              "give the folder oomdiag-<pid>, or --redact for the report alone");
}

constexpr std::array kFormats = {
    Format{"html", ".html", make_html},
    Format{"folded", ".folded", make_folded},
    Format{"markdown", ".md", [](const Explained& from) { return to_markdown(from.report); }},
    Format{"csv", ".csv", [](const Explained& from) { return to_csv(from.report); }},
    Format{"bundle", kBundleEnding, pack_run, /*shows_trace=*/false, /*is_private=*/true},
    Format{"perfetto", ".perfetto.json", make_perfetto, /*shows_trace=*/true},
    Format{"work", ".work.csv", make_work, /*shows_trace=*/true},
    Format{"snapshot", ".exported.pickle", make_snapshot, /*shows_trace=*/true},
};

std::string names_of_formats() {
  std::string names;
  for (const Format& format : kFormats) names += (names.empty() ? "" : ", ") + std::string(format.name);
  return names;
}

const Format& find_format_of(const std::string& name) {
  for (const Format& format : kFormats) {
    if (name == format.name) return format;
  }
  throw Error(ErrorKind::usage, fmt::format("--to {} is not known", name), "one of: " + names_of_formats());
}

/// "oomdiag-4711.html" of the folder oomdiag-4711, "snapshot.html" of snapshot.pickle.
std::filesystem::path default_output(const std::string& path, const Format& format) {
  std::filesystem::path from(path);
  if (from.filename().empty() || from.filename() == ".") from = std::filesystem::absolute(from).parent_path();
  if (from.filename() == "trace" || from.filename() == "report.json") {
    const std::filesystem::path folder = std::filesystem::absolute(from).parent_path();
    if (folder.filename().string().starts_with("oomdiag-")) from = folder;
  }
  if (from.extension() == ".gz") from = from.stem();
  return from.filename().replace_extension("").string() + format.ending;
}

void redact_for(const Format& format, Explained& from) {
  if (format.shows_trace) {
    throw Error(ErrorKind::usage,
                fmt::format("--redact does not go with --to {}, which contains all names", format.name),
                "html, folded, markdown, csv and bundle can be redacted");
  }
  redact(from);
}

/// A run that failed is described at its failure, another one at its peak.
void check_moment(const ExportOptions& options, const Report& report) {
  if (options.at.empty()) return;
  if (options.to != "snapshot") throw Error(ErrorKind::usage, "--at goes with --to snapshot only");
  const bool failed =
      std::ranges::any_of(report.devices, [](const auto& device) { return device.failure.has_value(); });
  if (failed == (options.at == "failure")) return;
  throw Error(ErrorKind::usage, fmt::format("--at {}: the run {}", options.at, failed ? "failed" : "did not fail"),
              failed ? "--at failure" : "--at peak");
}

int export_file(ExportOptions options) {
  options.path = source_or_newest_run(options.path);
  const Format& format = find_format_of(options.to);
  check_writable(options.output == "-" ? "" : options.output);
  const bool is_work =
      options.to == "work";  // --device names the GPU of a snapshot, and here the one that is asked for
  Explained from = load_explained(options.path, is_work ? SnapshotDevice{} : options.gpu);
  check_moment(options, from.report);
  from.at = options.at;
  from.source = options.path;
  if (is_work) from.work_device = options.gpu.device;
  if (options.redact) redact_for(format, from);
  const std::string text = format.make(from);
  if (options.output == "-") {
    write_out(text);
    return 0;
  }
  const std::filesystem::path output =
      options.output.empty() ? default_output(options.path, format) : std::filesystem::path(options.output);
  write_whole(text, output, format.is_private && !from.is_redacted ? 0600 : 0666);
  fmt::print("{}\n", output.string());
  return 0;
}

/// What names somebody: of the user and of the machine.
std::vector<std::string> find_secrets() {
  std::vector<std::string> secrets;
  const auto add = [&](const std::string& secret) {
    constexpr size_t kShortest = 3;
    if (secret.size() >= kShortest && secret != "root") secrets.push_back(secret);
  };
  for (const char* name : {"USER", "LOGNAME", "HOSTNAME"}) add(environment(name));
  if (const passwd* const user = getpwuid(geteuid()); user != nullptr) add(user->pw_name);
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) == 0) add(host.data());
  return secrets;
}

}  // namespace

void write_page(const Explained& from, const std::filesystem::path& file) { write_whole(make_html(from), file); }

void redact(Explained& from) {
  from.report = redact(from.report, find_secrets());
  from.is_redacted = true;
}

bool open_on_desktop(const std::filesystem::path& file) {
  const std::string name = std::filesystem::absolute(file).string();
  std::array<const char*, 3> words = {"xdg-open", name.c_str(), nullptr};
  posix_spawn_file_actions_t quiet;  // where there is no desktop it names all browsers that it misses
  posix_spawn_file_actions_init(&quiet);
  for (const int stream : {STDOUT_FILENO, STDERR_FILENO})
    posix_spawn_file_actions_addopen(&quiet, stream, "/dev/null", O_WRONLY, 0);
  pid_t child = 0;
  const int error = posix_spawnp(&child, words[0], &quiet, nullptr, const_cast<char* const*>(words.data()), environ);
  posix_spawn_file_actions_destroy(&quiet);
  if (error != 0) return false;
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void add_export(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<ExportOptions>();
  CLI::App& command = *app.add_subcommand("export", "write a report as a page or for other tools");
  set_help(command,
           {.example = "oomdiag export oomdiag-runs/oomdiag-4711 --to html",
            .about = "Turns a run folder, a trace, a report.json or a memory snapshot of PyTorch into one file, "
                     "and prints its name.",
            .usage = "oomdiag export [OPTIONS] [FILE] --to FORMAT"});
  add_optional_source(command, options->path);
  command.add_option("--to", options->to, names_of_formats())->type_name("FORMAT")->required();
  command.add_option("-o,--output", options->output, "the file to write; - for stdout")->type_name("FILE");
  command.add_option("--at", options->at, "of a snapshot: the failure, or the peak; else the whole recording")
      ->check(CLI::IsMember({"failure", "peak"}))
      ->type_name("MOMENT");
  command.add_flag("--redact", options->redact, "without paths, the command line and names of users");
  add_snapshot_device_options(command, options->gpu);
  command.callback([options, &chosen] { chosen = [options] { return export_file(*options); }; });
}

}  // namespace oomdiag
