#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

namespace oomdiag {

/// A line of a recorded stack, "/home/me/train.py:31 in forward".
struct StackCall {
  std::string_view place{};     ///< "/home/me/train.py:31"
  std::string_view function{};  ///< "forward"; empty where the line names none

  /// "train.py:31"
  std::string_view short_place() const { return place.substr(place.rfind('/') + 1); }
};

inline StackCall parse_call(std::string_view line) {
  constexpr std::string_view kIn = " in ";
  const size_t in = line.rfind(kIn);
  return in == line.npos ? StackCall{.place = line}
                         : StackCall{.place = line.substr(0, in), .function = line.substr(in + kIn.size())};
}

/// The calls of a stack, one per line of text.
inline std::vector<StackCall> parse_stack(std::string_view stack) {
  std::vector<StackCall> calls;
  while (!stack.empty()) {
    const std::string_view line = stack.substr(0, stack.find('\n'));
    stack.remove_prefix(std::min(line.size() + 1, stack.size()));
    calls.push_back(parse_call(line));
  }
  return calls;
}

}  // namespace oomdiag
