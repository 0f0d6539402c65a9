#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "profiler/explain/fixes/fixes.h"

// What a fix is called in a framework that owns the training loop: there nobody can write `loss.backward()` in another way, but
// there is an argument for it. Names are those of the frameworks' documentation.

namespace oomdiag {

/// A part of a path that only this framework's own code has. The first that the stack has is the framework: what drives the loop
/// stands before what it is made of.
struct FrameworkPath {
  std::string_view path, framework;
};

inline constexpr FrameworkPath kFrameworkPaths[] = {
    {"trl/trainer/", "trl"},
    {"transformers/trainer.py", "transformers"},
    {"lightning/pytorch/", "lightning"},
    {"pytorch_lightning/", "lightning"},
    {"ultralytics/", "ultralytics"},
    {"deepspeed/runtime/", "deepspeed"},
    {"diffusers/", "diffusers"},
    {"accelerate/", "accelerate"},
    {"torch_geometric/", "torch_geometric"},
    {"monai/", "monai"},
    {"timm/", "timm"},
    {"captum/", "captum"},
    {"torchdiffeq/", "torchdiffeq"},
};

/// The training framework that a stack names, "transformers" for "…/transformers/trainer.py:3749 in training_step"; empty: none.
/// `stack` are calls, one per line of text.
inline std::string_view find_framework(std::string_view stack) {
  const auto named = std::ranges::find_if(
      kFrameworkPaths, [&](const FrameworkPath& one) { return stack.find(one.path) != std::string_view::npos; });
  return named == std::end(kFrameworkPaths) ? std::string_view() : named->framework;
}

/// The lines by which a program of this framework gets the fix: arguments of its own classes. Nothing where the framework has
/// none, so that those of plain PyTorch hold. `batch` is that of the fix; where it is not known, "…" stands for it.
inline std::optional<std::vector<std::string>> lines_in_framework(std::string_view framework, std::string_view fix,
                                                                  std::optional<int64_t> batch) {
  const FixRow* const row = find_fix(fix);
  if (row == nullptr || framework.empty()) return std::nullopt;
  const auto found = std::ranges::find(row->in_frameworks, framework, &FrameworkLine::framework);
  if (found == std::end(row->in_frameworks)) {
    return row->same_as.empty() ? std::nullopt : lines_in_framework(framework, row->same_as, batch);
  }
  constexpr std::string_view kBatch = "{batch}";
  std::string lines(found->lines);
  if (const size_t at = lines.find(kBatch); at != lines.npos) {
    lines.replace(at, kBatch.size(), batch ? std::to_string(*batch) : "…");
  }
  return split_lines(lines);
}

}  // namespace oomdiag
