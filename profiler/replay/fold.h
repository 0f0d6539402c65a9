#pragma once

#include <string>
#include <string_view>

namespace oomdiag {

/// "transformer.h.*.mlp" of "transformer.h.11.mlp": bare numbers are indices of layers that are alike.
std::string fold_indices(std::string_view path);

}  // namespace oomdiag
