#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "samples/training.h"

namespace samples {

/// A model with its training loop, or a loop that shows something about memory.
struct Model {
  std::string_view name;
  std::string_view reference_case;  ///< row of the reference cases, or empty
  std::vector<std::string_view> variants;
  int64_t batch = 0;           ///< by default; 0 = has no batches
  int64_t steps = 0;           ///< by default; 0 = does its thing once
  std::string_view optimizer;  ///< by default; empty = has none, or one that is not to be chosen
  bool takes_amp = false;
  std::string_view about;
  void (*run)(const Options&) = nullptr;
  void (*prepare)(const Options&) = nullptr;  ///< before the first use of CUDA, where allocator settings are still free
  bool accumulates = false;                   ///< can take its batch in parts
};

/// All of them. The first variant of each is the default.
std::span<const Model> all_models();

/// The model of this name; nullptr if there is none.
const Model* find_model(std::string_view name);

/// All of them as JSON, for `oomdiag models`.
std::string list_models();

}  // namespace samples
