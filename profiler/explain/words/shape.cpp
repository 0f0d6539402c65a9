#include "profiler/explain/words/shape.h"

#include <charconv>

namespace oomdiag {

std::vector<int64_t> parse_shape(std::string_view text) {
  std::vector<int64_t> shape;
  const size_t end = text.find(']');
  if (!text.starts_with('[') || end == text.npos) return shape;
  const char* at = text.data() + 1;
  while (at < text.data() + end) {
    int64_t size = 0;
    const auto [next, error] = std::from_chars(at, text.data() + end, size);
    if (error == std::errc()) shape.push_back(size);
    at = next == at ? at + 1 : next;
  }
  return shape;
}

std::string_view parse_dtype(std::string_view text) {
  const size_t space = text.rfind("] ");
  return space == text.npos ? std::string_view() : text.substr(space + 2);
}

}  // namespace oomdiag
