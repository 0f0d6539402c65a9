#include "profiler/explain/words/evaluation.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace oomdiag {

bool is_evaluation(std::string_view function) {
  constexpr std::array<std::string_view, 7> kBeginnings = {"eval",    "valid",           "test", "predict", "infer",
                                                           "extract", "compute_features"};
  while (function.starts_with('_')) function.remove_prefix(1);
  const bool begins =
      std::ranges::any_of(kBeginnings, [&](std::string_view word) { return function.starts_with(word); });
  return begins || function.find("evaluat") != function.npos || function.find("validat") != function.npos;
}

}  // namespace oomdiag
