#pragma once

#include <cufft.h>
#include <cufftXt.h>

#include <vector>

#include "extension/virtual_device/stubs/handle.h"

namespace oomdiag {

/// The sizes of a transform, one for each dimension.
using Sizes = std::vector<long long>;
template <typename Integer>
Sizes sizes_of(const Integer* sizes, int rank) {
  return {sizes, sizes + rank};
}

/// A kernel on the stream of a plan.
cufftResult execute(cufftHandle plan);

/// The work area of a plan, in bytes; noted as an estimate. Taken from the GPU where the plan allocates it itself.
cufftResult make(cufftHandle plan, const Sizes& sizes, long long batch, cufftType type, size_t* bytes);
cufftResult make(cufftHandle plan, const Sizes& sizes, long long batch, cudaDataType type, size_t* bytes);
cufftResult make_new(cufftHandle* plan, const Sizes& sizes, long long batch, cufftType type);
cufftResult estimate(const char* name, const Sizes& sizes, long long batch, cufftType type, size_t* bytes);

}  // namespace oomdiag
