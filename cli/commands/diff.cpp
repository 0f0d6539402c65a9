#include "profiler/diff/diff.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "cli/commands/commands.h"
#include "cli/reports/reports.h"
#include "cli/terminal/help.h"
#include "cli/terminal/sizes.h"
#include "cli/terminal/terminal.h"

namespace oomdiag {
namespace {

struct DiffCommand {
  std::string before, after, least;
  bool json = false;
};

int diff_files(const DiffCommand& options) {
  DiffOptions noise;
  if (!options.least.empty()) noise.least_bytes = parse_bytes(options.least);
  const ReportDiff found = diff(load_report(options.before), load_report(options.after), noise);
  write_out(options.json ? to_json(found) + "\n"
                         : to_text(found, output_capabilities(STDOUT_FILENO).unicode, options.before, options.after));
  return found.is_empty() ? 0 : 1;
}

}  // namespace

void add_diff(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<DiffCommand>();
  CLI::App& command = *app.add_subcommand("diff", "what grew between two runs");
  set_help(command, {.example = "oomdiag diff before.json oomdiag-4711",
                     .about = "Says what the second run holds more or less than the first, by category, module, op and "
                              "line: run folders, traces, reports or snapshots. What differs between two runs of the "
                              "same program does not count. Exit code 0 if nothing differs, 1 if something does.",
                     .usage = "oomdiag diff [OPTIONS] BEFORE AFTER"});
  add_source(command, options->before, "BEFORE");
  add_source(command, options->after, "AFTER");
  command.add_option("--least", options->least, "changes that count; default 64KiB, and a thousandth of the peak")
      ->type_name("SIZE");
  command.add_flag("--json", options->json, "print the difference as JSON");
  command.callback([options, &chosen] { chosen = [options] { return diff_files(*options); }; });
}

}  // namespace oomdiag
