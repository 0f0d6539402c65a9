#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <memory>
#include <new>

#include "cli/commands/commands.h"
#include "cli/commands/export.h"
#include "cli/device/device.h"
#include "cli/experiments/complete.h"
#include "cli/experiments/run_ranks.h"
#include "cli/launch/diagnosis.h"
#include "cli/launch/programs.h"
#include "cli/launch/ranks.h"
#include "cli/process/environment.h"
#include "cli/process/launcher.h"
#include "cli/process/own_process.h"
#include "cli/process/workers.h"
#include "cli/python/install.h"
#include "cli/reports/reports.h"
#include "cli/reports/run_folder.h"
#include "cli/terminal/help.h"
#include "cli/terminal/terminal.h"
#include "profiler/error.h"
#include "profiler/report/report.h"

namespace oomdiag {
namespace {

struct RunOptions {
  std::vector<std::string> program;
  DeviceOptions device;
  RankOptions ranks;
  std::string folder;
  std::string output;
  std::string html;
  int attach_at_step = 1;
  bool no_progress = false;
  bool completes = false;
  bool native_stacks = false;
  bool is_metered = false;
  int oom_exit_code = -1;  ///< -1 = the program's own
};

/// `oomdiag run PROGRAM ... -- ...` leaves the separator to the program, `oomdiag run -- PROGRAM ...` does not.
std::vector<std::string> join_program(std::vector<std::string> before, const std::vector<std::string>& from_separator) {
  const bool is_ours = before.empty() && !from_separator.empty();
  before.insert(before.end(), from_separator.begin() + (is_ours ? 1 : 0), from_separator.end());
  return before;
}

/// The exit code of the program, or the one that the user wants instead for an out of memory.
int exit_code_of(int programs_own, const std::optional<Report>& report, const RunOptions& options) {
  const bool out_of_memory = report && report->outcome == "out_of_memory";
  return out_of_memory && options.oom_exit_code >= 0 ? options.oom_exit_code : programs_own;
}

/// Makes and shows a report after the program has ended: the exit code is the program's, whatever happens here.
void guard(const std::function<void()>& report) {
  try {
    report();
  } catch (const Interrupted&) {
    say("warning: interrupted before the report was made");
  } catch (const std::bad_alloc&) {
    say("warning: the host has not enough memory for the report");
  } catch (const std::exception& error) {
    say(fmt::format("warning: {}", error.what()));
  }
}

void write_files(const Report& report, const std::filesystem::path& folder, const RunOptions& options) {
  if (!options.output.empty()) write_json(report, options.output);
  if (options.html.empty()) return;
  // The page is made of the trace, which may be too much for this host.
  const auto said = run_apart([&]() -> std::string {
    try {
      write_page(load_explained(folder), options.html);
      return {};
    } catch (const std::bad_alloc&) {
      return "the host has not enough memory for the page";
    } catch (const std::exception& error) {
      return error.what();
    }
  });
  const std::string why = said.value_or("the process that was to write the page died");
  if (!why.empty()) throw Error(ErrorKind::environment, why);
}

/// Of a run that grows, and ended before memory did, the program's variables are gone: with less memory it runs out on the way, and they
/// are not. The command, or empty.
std::string command_that_runs_out(const Report& report, const RunOptions& options, const DeviceChoice& device) {
  const ReportOfDevice* const main = main_device_of(report);
  if (report.outcome != "ok" || main == nullptr || !device.is_virtual() || options.ranks.is_job()) return {};
  if (main->growth.empty() || !main->growth.front().referrer.empty() || !main->out_of_memory_near_step) return {};
  const int64_t bytes = main->peak.allocated_bytes - main->growth.front().grown_bytes / 4 +
                        std::max<int64_t>(0, main->memory.non_pytorch_bytes);
  std::vector<std::string> words{"oomdiag", "run"};
  if (!options.device.device.empty()) words.insert(words.end(), {"--device", options.device.device});
  words.insert(words.end(), {"--memory", fmt::format("{}MiB", bytes >> 20), "--"});
  words.insert(words.end(), options.program.begin(), options.program.end());
  return line_for_shell(words);
}

void show(const Diagnosis& diagnosis, const RunOptions& options, const DeviceChoice& device) {
  if (!diagnosis.why_killed.empty()) say(diagnosis.why_killed);
  if (!diagnosis.why_no_report.empty()) say(diagnosis.why_no_report);
  if (!diagnosis.report) {
    remove_empty_run(diagnosis.folder);
    return;
  }
  guard([&] { write_files(*diagnosis.report, diagnosis.folder, options); });
  const std::string command = command_that_runs_out(*diagnosis.report, options, device);
  print_text(*diagnosis.report, stderr, false, command.empty() ? "" : command + "   (runs out, and says who keeps it)");
}

void complete_worst(RanksDiagnosis& ranks, const Job& job, DiagnosisRequest request, const Install& install) {
  Diagnosis worst;
  worst.folder = ranks.folder;
  worst.report = ranks.report;
  request.rank = SingleRank{.job = job, .number = worst.report->rank};
  complete(worst, request, install);
  ranks.report = std::move(worst.report);
}

int run_job(const RunOptions& options, const Job& job, const DiagnosisRequest& request, const Install& install) {
  Steps steps("ranks");
  const std::size_t expected = std::max<std::size_t>(job.ranks.size(), 2);
  RanksDiagnosis ranks =
      run_ranks(job, request, install, [&](std::size_t over) { steps.show(over, std::max(over, expected)); });
  steps.hide();
  guard([&] { explain_ranks(ranks); });
  guard([&] {
    if (options.completes && ranks.report) complete_worst(ranks, job, request, install);
  });
  guard([&] {
    if (ranks.report) write_files(*ranks.report, ranks.folder, options);
  });
  guard([&] {
    if (ranks.report) print_text(*ranks.report, stderr);
    complain(kinds_text(ranks));
  });
  return exit_code_of(ranks.exit_code(), ranks.report, options);
}

int run(const RunOptions& options) {
  if (options.program.empty()) {
    throw Error(ErrorKind::usage, "run needs a program", "as in: oomdiag run --device rtx4090 -- python train.py");
  }
  ignore_broken_pipes();  // the program's end and the files do not hang on who reads the report
  Install install = find_install();
  const Job job = choose_job(options.ranks, options.device.count);
  const DeviceChoice device = choose_device(device_of(job, options.device), install);
  check_writable(options.output);
  check_writable(options.html, "--html");
  say_default(device);
  DiagnosisRequest request{.program = resolve_program(options.program, install),
                           .device = device,
                           .base = choose_base(options.folder),
                           .attach_at_step = options.attach_at_step,
                           .shows_progress = !options.no_progress,
                           .native_stacks = options.native_stacks,
                           .is_metered = options.is_metered,
                           .keeps_output = false};
  if (options.ranks.is_job()) {
    request.device = {.device = host_of(job, device)};
    if (job.is_distinct || job.ranks.size() > 1) return run_job(options, job, request, install);
    request.rank = SingleRank{.job = job, .number = job.ranks.front()};
  }
  Diagnosis diagnosis = diagnose(request, install);
  guard([&] {
    if (options.completes) complete(diagnosis, request, install);
  });
  guard([&] { show(diagnosis, options, device); });
  const int code = exit_code_of(diagnosis.ending.code(), diagnosis.report, options);
  if (diagnosis.ending.signal != 0 && code == diagnosis.ending.code()) throw KilledBySignal{diagnosis.ending.signal};
  return code;
}

}  // namespace

void add_run(CLI::App& app, Command& chosen, const std::vector<std::string>& from_separator) {
  auto options = std::make_shared<RunOptions>();
  CLI::App& command = *app.add_subcommand("run", "run any program unchanged and explain its memory");
  set_help(command,
           {.example = "oomdiag run --device rtx4090 -- python train.py --batch-size 64",
            .about = "Runs a Python or C++ program unchanged, on a real or a virtual device. Its input, output and\n"
                     "exit code are its own; the report follows on stderr.",
            .usage = "oomdiag run [OPTIONS] -- PROGRAM [ARGUMENTS...]"});
  command.prefix_command();
  add_device_options(command, options->device);
  add_rank_options(command, options->ranks);
  add_json_file(command, options->output);
  add_page_file(command, options->html);
  add_runs_folder(command, options->folder);
  command
      .add_option("--oom-exit-code", options->oom_exit_code,
                  "exit with this when out of memory, in place of the program's own code")
      ->type_name("N")
      ->check(range(0, 255));
  command
      .add_option("--attach-at-step", options->attach_at_step,
                  "begin to record with this optimizer step; the steps before it run as without us")
      ->type_name("N")
      ->check(range(1, 1 << 30));
  command.add_flag("--native-stacks", options->native_stacks,
                   "name the C++ calls that led to a failed request (costs milliseconds at an OOM, nothing else)");
  command.add_flag(
      "--meter", options->is_metered,
      "record the shapes of all operators: FLOPs, memory traffic and the modelled time of a step (slows the run)");
  command.add_flag(
      "--complete", options->completes,
      "where it runs out of memory, run it once more on a virtual GPU with more memory: need and fixes are then "
      "those of a whole run (for programs that may be run twice)");
  command.add_flag("--no-progress", options->no_progress, "no live line on the terminal while the program runs");
  command.callback([options, &command, &chosen, &from_separator] {
    const std::vector<std::string> rest = command.remaining();
    if (!rest.empty() && rest.front().starts_with('-') && rest.front() != "--")
      throw CLI::ExtrasError(rest);  // no program
    options->program = join_program(rest, from_separator);
    chosen = [options] { return run(*options); };
  });
}

}  // namespace oomdiag
