#include "profiler/replay/fold.h"

#include <algorithm>
#include <cctype>

namespace oomdiag {

std::string fold_indices(std::string_view path) {
  std::string folded;
  while (true) {
    const size_t dot = std::min(path.find('.'), path.size());
    const std::string_view part = path.substr(0, dot);
    folded += !part.empty() && std::ranges::all_of(part, [](unsigned char c) { return std::isdigit(c); }) ? "*" : part;
    if (dot == path.size()) return folded;
    folded += '.';
    path.remove_prefix(dot + 1);
  }
}

}  // namespace oomdiag
