#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace oomdiag {

/// A command whose output goes to a file.
struct LoggedCommand {
  std::vector<std::string> arguments;
  std::filesystem::path log;
};

/// Runs commands, as many at once as there are processors, and tells `over` after each how many are. The index of the first that
/// failed, when the others have ended; else their number.
std::size_t run_at_once(const std::vector<LoggedCommand>& commands, const std::function<void(std::size_t)>& over);

}  // namespace oomdiag
