#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "cli/commands/commands.h"
#include "cli/process/environment.h"
#include "cli/process/files.h"
#include "cli/python/install.h"
#include "cli/terminal/help.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

int print_environment() {
  const std::filesystem::path libraries = find_install().libraries;
  if (!is_there(libraries / "python" / "oomdiag")) {
    throw Error(ErrorKind::environment, fmt::format("the Python package is missing from '{}'", libraries.string()),
                "build it: scripts/build");
  }
  fmt::print("export PYTHONPATH={}\n", quoted_for_shell(before_python_path(libraries / "python")));
  fmt::print("export OOMDIAG_LIBRARY={}\n", quoted_for_shell((libraries / "liboomdiag.so").string()));
  return 0;
}

}  // namespace

void add_env(CLI::App& app, Command& chosen) {
  CLI::App& command = *app.add_subcommand("env", "what a shell needs so that Python finds `import oomdiag`");
  set_help(command, {.example = "oomdiag env",
                     .about = "Prints shell commands, for eval \"$(oomdiag env)\", after which `import oomdiag` and, "
                              "in a notebook, `%load_ext oomdiag`\n"
                              "work, and torch.ops.load_library(os.environ['OOMDIAG_LIBRARY']) does.",
                     .usage = "oomdiag env"});
  command.callback([&chosen] { chosen = [] { return print_environment(); }; });
}

}  // namespace oomdiag
