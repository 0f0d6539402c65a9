#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdlib>

#include "cli/commands.h"
#include "cli/help.h"
#include "cli/install.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

/// For a shell: in single quotes, which themselves are put outside of them.
std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char letter : text) {
    result += letter == '\'' ? std::string("'\\''") : std::string(1, letter);
  }
  return result + "'";
}

int print_environment() {
  const std::filesystem::path libraries = find_install().libraries;
  std::error_code ignored;
  if (!std::filesystem::exists(libraries / "python" / "oomdiag", ignored)) {
    throw Error(ErrorKind::environment, fmt::format("the Python package is missing from '{}'", libraries.string()),
                "build it: scripts/build");
  }
  const char* const before = std::getenv("PYTHONPATH");
  const std::string rest = before == nullptr || *before == '\0' ? "" : fmt::format(":{}", before);
  fmt::print("export PYTHONPATH={}\n", quoted((libraries / "python").string() + rest));
  fmt::print("export OOMDIAG_LIBRARY={}\n", quoted((libraries / "liboomdiag.so").string()));
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
