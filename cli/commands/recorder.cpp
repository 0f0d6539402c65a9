#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands/commands.h"
#include "cli/python/install.h"
#include "cli/python/python.h"
#include "cli/terminal/help.h"
#include "cli/terminal/json_text.h"
#include "cli/terminal/terminal.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

int print_recorder(const std::string& python) {
  Install install = find_install();
  if (!python.empty() && !is_python(python)) {
    throw Error(ErrorKind::usage, fmt::format("'{}' is no Python", python), "as in: oomdiag recorder .venv/bin/python");
  }
  prepare_torch(python.empty() ? install.python.string() : python, install);
  if (install.recorder.empty()) throw Error(ErrorKind::environment, install.no_recorder);
  const nlohmann::json answer = {{"torch", install.torch_version},
                                 {"recorder", install.recorder.string()},
                                 {"contents", install.contents.string()},
                                 {"reports", (install.libraries / "liboomdiag_reports.so").string()}};
  write_out(to_text(answer) + '\n');
  return 0;
}

}  // namespace

void add_recorder(CLI::App& app, Command& chosen) {
  auto python = std::make_shared<std::string>();
  CLI::App& command = *app.add_subcommand("recorder", "make the recorder for a Python's torch, and say where it lies");
  set_help(
      command,
      {.example = "oomdiag recorder python",
       .about = "Builds what depends on the torch of a Python, if that is not done yet, and prints as JSON where it\n"
                "lies. Other commands do this by themselves; in an image of a container, do it when the image is made.",
       .usage = "oomdiag recorder [PYTHON]"});
  command.add_option("PYTHON", *python, "an interpreter; default: python3")->type_name("");
  command.callback([python, &chosen] { chosen = [python] { return print_recorder(*python); }; });
}

}  // namespace oomdiag
