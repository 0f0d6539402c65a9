#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands/commands.h"
#include "cli/commands/export.h"
#include "cli/device/snapshot_device.h"
#include "cli/experiments/match_program.h"
#include "cli/process/files.h"
#include "cli/reports/reports.h"
#include "cli/reports/timeline_text.h"
#include "cli/terminal/help.h"
#include "cli/terminal/terminal.h"
#include "profiler/error.h"
#include "profiler/snapshot/format.h"
#include "profiler/snapshot/timeline.h"

namespace oomdiag {
namespace {

struct ExplainOptions {
  std::string path;
  std::vector<std::string> program;  ///< of a snapshot
  std::string output;
  SnapshotDevice gpu;
  bool json = false;
  bool redact = false;
  bool opens = false;
  bool all = false;
};

/// The page lies in the run folder, else beside the file that was given.
int show_page(const Explained& from, const std::filesystem::path& path) {
  const bool is_folder = std::filesystem::is_directory(path);
  const std::filesystem::path page = is_folder ? path / "report.html" : std::filesystem::path(path.string() + ".html");
  write_page(from, page);
  const bool opened = open_on_desktop(page);
  fmt::print("{}\n", page.string());
  if (!opened) complain("hint: there is no desktop here to open it on; open it in any browser\n");
  return 0;
}

/// Totals make no report.
int explain_timeline(const ExplainOptions& options) {
  if (options.json || options.redact || options.opens || !options.output.empty() || options.gpu.is_given()) {
    throw Error(ErrorKind::usage, fmt::format("'{}' is a memory timeline: it takes no options", options.path),
                "it is not enough for a report; oomdiag explain FILE prints it");
  }
  write_out(to_text(read_timeline(options.path), output_capabilities(STDOUT_FILENO).unicode));
  return 0;
}

int explain(ExplainOptions options) {
  options.path = source_or_newest_run(options.path);
  if (is_file(options.path) && is_timeline(options.path)) return explain_timeline(options);
  check_writable(options.output);
  Explained from = options.program.empty() ? load_explained(options.path, options.gpu)
                                           : match_program(options.path, options.gpu, options.program);
  if (options.redact) redact(from);
  if (!options.output.empty()) write_json(from.report, options.output);
  if (options.opens) return show_page(from, options.path);
  options.json ? print_json(from.report) : print_text(from.report, stdout, options.all);
  return 0;
}

}  // namespace

void add_explain(CLI::App& app, Command& chosen, const std::vector<std::string>& from_separator) {
  auto options = std::make_shared<ExplainOptions>();
  CLI::App& command = *app.add_subcommand("explain", "explain a trace, a report or a PyTorch memory snapshot");
  set_help(command,
           {.example = "oomdiag explain oomdiag-runs/oomdiag-4711",
            .about = "Prints the report on a run, given its folder, its trace, its report.json, or a memory "
                     "snapshot that PyTorch wrote (torch.cuda.memory._dump_snapshot).\n"
                     "With the program of a snapshot behind --, runs it on the virtual device --device and explains "
                     "that run, if it allocates what the snapshot shows.\n"
                     "Of a memory timeline or a Chrome trace of torch.profiler it prints the totals.",
            .usage = "oomdiag explain [OPTIONS] ([FILE] | SNAPSHOT -- PROGRAM [...])"});
  add_optional_source(command, options->path);
  add_snapshot_device_options(command, options->gpu);
  command.add_flag("--all", options->all, "print every table, not the first screen only");
  command.add_flag("--json", options->json, "print the report as JSON");
  command.add_flag("--redact", options->redact, "for sharing: without paths, the command line and names of users");
  command.add_flag("--open", options->opens, "write the report as a page, and open it in the browser");
  add_json_file(command, options->output);
  command.callback([options, &chosen, &from_separator] {
    if (!from_separator.empty()) options->program.assign(from_separator.begin() + 1, from_separator.end());
    chosen = [options] { return explain(*options); };
  });
}

}  // namespace oomdiag
