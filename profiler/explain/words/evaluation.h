#pragma once

#include <string_view>

namespace oomdiag {

/// Whether a function of the program is called as those that evaluate are: "validate", "_eval_epoch", "compute_features".
bool is_evaluation(std::string_view function);

}  // namespace oomdiag
