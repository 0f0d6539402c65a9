#pragma once

#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace oomdiag {

/// Exit codes; `run` passes its program's own through.
inline constexpr int kFailed = 1, kUsage = 2;
inline constexpr int kOutOfMemory = 3;  ///< of train; of fit and fix: nothing makes it fit
inline constexpr int kInterrupted = 130;

/// What the command line asked for: runs it and returns the exit code.
using Command = std::function<int()>;

/// Each adds its subcommand and options to `app`, and sets `chosen` when the command line names it. One file per
/// command. `from_separator` is the command line from its first "--" on: the program of `run` or the python
/// of `doctor`, which must not be parsed.
void add_train(CLI::App& app, Command& chosen);
void add_run(CLI::App& app, Command& chosen, const std::vector<std::string>& from_separator);
void add_fit(CLI::App& app, Command& chosen, const std::vector<std::string>& from_separator);
void add_fix(CLI::App& app, Command& chosen, const std::vector<std::string>& from_separator);
void add_explain(CLI::App& app, Command& chosen, const std::vector<std::string>& from_separator);
void add_export(CLI::App& app, Command& chosen);
void add_diff(CLI::App& app, Command& chosen);
void add_check(CLI::App& app, Command& chosen);
void add_watch(CLI::App& app, Command& chosen);
void add_clean(CLI::App& app, Command& chosen);
void add_compare(CLI::App& app, Command& chosen);
void add_devices(CLI::App& app, Command& chosen);
void add_mcp(CLI::App& app, Command& chosen);
void add_models(CLI::App& app, Command& chosen);
void add_recorder(CLI::App& app, Command& chosen);
void add_doctor(CLI::App& app, Command& chosen, const std::vector<std::string>& from_separator);
void add_shell_completion(CLI::App& app, Command& chosen);
void add_env(CLI::App& app, Command& chosen);

}  // namespace oomdiag
