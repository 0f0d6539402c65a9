#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace oomdiag {

/// The training framework that a stack names, "transformers" for "…/transformers/trainer.py:3749 in training_step"; empty: none.
/// `stack` are calls, one per line of text.
std::string_view find_framework(std::string_view stack);

/// The lines by which a program of this framework gets the fix: arguments of its own classes. Nothing where the framework has
/// none, so that those of plain PyTorch hold. `batch` is that of the fix; where it is not known, "…" stands for it.
std::optional<std::vector<std::string>> lines_in_framework(std::string_view framework, std::string_view fix,
                                                           std::optional<int64_t> batch);

}  // namespace oomdiag
