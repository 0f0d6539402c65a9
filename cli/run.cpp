#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "cli/commands.h"
#include "cli/completion.h"
#include "cli/diagnosis.h"
#include "cli/export.h"
#include "cli/help.h"
#include "cli/programs.h"
#include "cli/ranks.h"
#include "cli/reports.h"
#include "cli/run_folder.h"
#include "cli/run_ranks.h"
#include "cli/terminal.h"
#include "profiler/error.h"

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
  int oom_exit_code = -1;  ///< -1 = the program's own
};

/// `oomdiag run PROGRAM ... -- ...` leaves the separator to the program, `oomdiag run -- PROGRAM ...` does not.
std::vector<std::string> join_program(std::vector<std::string> before, const std::vector<std::string>& from_separator) {
  const bool is_ours = before.empty() && !from_separator.empty();
  before.insert(before.end(), from_separator.begin() + (is_ours ? 1 : 0), from_separator.end());
  return before;
}

void show(const Diagnosis& diagnosis, const RunOptions& options) {
  if (!diagnosis.report) {
    say(diagnosis.why_no_report);
    remove_empty_run(diagnosis.folder);
    return;
  }
  print_text(*diagnosis.report, stderr);
  if (!options.output.empty()) write_json(*diagnosis.report, options.output);
  if (!options.html.empty()) write_page(load_explained(diagnosis.folder), options.html);
}

int run_ranks(const RunOptions& options, const Job& job, const DiagnosisRequest& request, const Install& install) {
  Steps steps("ranks");
  const std::size_t expected = std::max<std::size_t>(job.ranks.size(), 2);
  RanksDiagnosis ranks =
      diagnose_ranks(job, request, install, [&](std::size_t over) { steps.show(over, std::max(over, expected)); });
  steps.hide();
  if (options.completes && ranks.report) {
    Diagnosis worst;
    worst.folder = ranks.folder;
    worst.report = std::move(ranks.report);
    DiagnosisRequest again = request;
    again.rank = LoneRank{.job = job, .number = worst.report->rank};
    complete(worst, again, install);
    ranks.report = std::move(worst.report);
  }
  if (ranks.report) print_text(*ranks.report, stderr);
  fmt::print(stderr, "{}", kinds_text(ranks));
  if (ranks.report && !options.output.empty()) write_json(*ranks.report, options.output);
  if (ranks.report && !options.html.empty()) write_page(load_explained(ranks.folder), options.html);
  const bool out_of_memory = ranks.report && ranks.report->outcome == "out_of_memory";
  return out_of_memory && options.oom_exit_code >= 0 ? options.oom_exit_code : ranks.exit_code();
}

int run(const RunOptions& options) {
  if (options.program.empty()) {
    throw Error(ErrorKind::usage, "run needs a program", "as in: oomdiag run --device rtx4090 -- python train.py");
  }
  Install install = find_install();
  const Job job = choose_job(options.ranks, options.device.count);
  const DeviceChoice device = choose_device(device_of(job, options.device), install);
  check_writable(options.output);
  check_writable(options.html);
  say_default(device);
  DiagnosisRequest request{.program = resolve_program(options.program, install),
                           .device = device,
                           .base = choose_base(options.folder),
                           .attach_at_step = options.attach_at_step,
                           .shows_progress = !options.no_progress,
                           .native_stacks = options.native_stacks,
                           .keeps_output = false};
  if (options.ranks.is_job()) {
    request.device = host_of(job, device);
    if (job.is_distinct || job.ranks.size() > 1) return run_ranks(options, job, request, install);
    request.rank = LoneRank{.job = job, .number = job.ranks.front()};
  }
  Diagnosis diagnosis = diagnose(request, install);
  try {
    if (options.completes) complete(diagnosis, request, install);
    show(diagnosis, options);
  } catch (const std::exception& error) {
    say(fmt::format("warning: {}", error.what()));  // the exit code is the program's, whatever happens to the report
  }
  const bool out_of_memory = diagnosis.report && diagnosis.report->outcome == "out_of_memory";
  return out_of_memory && options.oom_exit_code >= 0 ? options.oom_exit_code : diagnosis.ending.code();
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
  command.add_option("-o,--output", options->output, "write the report as JSON to this file")->type_name("FILE");
  command.add_option("--html", options->html, "write the report as a page to this file")->type_name("FILE");
  command.add_option("--folder", options->folder, "where to make the run folder oomdiag-<pid>; default: here")
      ->type_name("DIR");
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
                   "name the C++ calls that led to a refused request (costs milliseconds at an OOM, nothing else)");
  command.add_flag(
      "--complete", options->completes,
      "where it runs out of memory, run it once more on a virtual card with room: need and remedies are then\n"
      "those of a whole run (for programs that may be run twice)");
  command.add_flag("--no-progress", options->no_progress, "no live line on the terminal while the program runs");
  command.callback([options, &command, &chosen, &from_separator] {
    options->program = join_program(command.remaining(), from_separator);
    chosen = [options] { return run(*options); };
  });
}

}  // namespace oomdiag
