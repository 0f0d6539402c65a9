#include "cli/process/environment.h"

#include <cstdlib>
#include <string_view>

namespace oomdiag {

std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string before_python_path(const std::filesystem::path& folder) {
  const std::string before = environment("PYTHONPATH");
  return before.empty() ? folder.string() : folder.string() + ":" + before;
}

std::string quoted_for_shell(const std::string& text) {
  const std::string_view plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./,:@%";
  if (!text.empty() && text.find_first_not_of(plain) == text.npos) return text;
  std::string result = "'";
  for (const char letter : text) result += letter == '\'' ? std::string("'\\''") : std::string(1, letter);
  return result + "'";
}

std::string line_for_shell(const std::vector<std::string>& words) {
  std::string line;
  for (const std::string& word : words) line += (line.empty() ? "" : " ") + quoted_for_shell(word);
  return line;
}

}  // namespace oomdiag
