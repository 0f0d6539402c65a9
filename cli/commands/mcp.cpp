#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "cli/commands/commands.h"
#include "cli/process/environment.h"
#include "cli/process/files.h"
#include "cli/process/launcher.h"
#include "cli/python/install.h"
#include "cli/terminal/help.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

/// The server is Python, as its SDK is: extension/python/oomdiag/_mcp.py.
int serve() {
  const Install install = find_install();
  const std::string python = install.python.string();
  const std::filesystem::path package = install.libraries / "python";
  if (is_there(package / "oomdiag")) {
    setenv("PYTHONPATH", before_python_path(package).c_str(), /*overwrite=*/1);
  }
  exec_program({python, "-m", "oomdiag", "mcp"});
  throw Error(ErrorKind::environment, fmt::format("cannot start '{}': {}", python, std::strerror(errno)));
}

}  // namespace

void add_mcp(CLI::App& app, Command& chosen) {
  CLI::App& command = *app.add_subcommand("mcp", "a server for agents: run, explain, fix, fit, diff as tools");
  set_help(command, {.example = "oomdiag mcp",
                     .about = "Speaks the Model Context Protocol on stdin and stdout. Wants its SDK: pip install mcp.\n"
                              "In an agent's configuration: {\"mcpServers\": {\"oomdiag\": {\"command\": \"oomdiag\", "
                              "\"args\": [\"mcp\"]}}}",
                     .usage = "oomdiag mcp"});
  command.callback([&chosen] { chosen = [] { return serve(); }; });
}

}  // namespace oomdiag
