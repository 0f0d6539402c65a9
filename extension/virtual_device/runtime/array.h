#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace oomdiag {

/// A cudaArray_t is a CUarray.
inline CUarray driver_array(cudaArray_const_t array) {
  return reinterpret_cast<CUarray>(const_cast<cudaArray_t>(array));
}

/// What a texture or a surface object points at.
struct TextureObject {
  cudaResourceDesc resource{};
  cudaTextureDesc texture{};
};

inline TextureObject* find_texture(cudaTextureObject_t object) { return reinterpret_cast<TextureObject*>(object); }

}  // namespace oomdiag
