#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

// Tensors carry their sizes and element type as one text, "[64, 3] float32": names are interned in the trace.
namespace oomdiag {

/// The sizes of "[64, 3] float32"; empty for a scalar and for text that is no shape. Sizes out of range are left out.
std::vector<int64_t> parse_shape(std::string_view text);

/// "float32" of "[64, 3] float32", or empty.
std::string_view parse_dtype(std::string_view text);

}  // namespace oomdiag
