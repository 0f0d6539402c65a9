#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "cli/commands.h"
#include "cli/help.h"
#include "cli/reports.h"

namespace oomdiag {
namespace {

struct Options {
  std::string path;
  std::string output;
  bool json = false;
};

int explain(const Options& options) {
  check_writable(options.output);
  const Report report = load_report(options.path);
  if (!options.output.empty()) write_json(report, options.output);
  options.json ? print_json(report) : print_text(report, stdout);
  return 0;
}

}  // namespace

void add_explain(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<Options>();
  CLI::App& command = *app.add_subcommand("explain", "explain a trace, a report or a PyTorch memory snapshot");
  set_help(command, {.example = "oomdiag explain oomdiag-4711",
                     .about = "Prints the report on a run, given its folder, its trace, its report.json, or a memory "
                              "snapshot that PyTorch wrote (torch.cuda.memory._dump_snapshot).",
                     .usage = "oomdiag explain [OPTIONS] FILE"});
  command.add_option("FILE", options->path, "a trace, a report, a run folder or a snapshot.pickle")
      ->type_name("")
      ->required();
  command.add_flag("--json", options->json, "print the report as JSON");
  command.add_option("-o,--output", options->output, "write the report as JSON to this file")->type_name("FILE");
  command.callback([options, &chosen] { chosen = [options] { return explain(*options); }; });
}

}  // namespace oomdiag
