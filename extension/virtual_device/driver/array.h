#pragma once

#include <cuda.h>

namespace oomdiag {

/// Bytes from one row to the next of linear memory that is to have rows of `width` bytes.
inline size_t pitch_of(size_t width) {
  constexpr size_t kAlignment = 512;
  return (width + kAlignment - 1) / kAlignment * kAlignment;
}

/// Bytes of an element: its channels are numbers of 8, 16 or 32 bits.
inline size_t element_bytes(const CUDA_ARRAY3D_DESCRIPTOR& shape) {
  switch (static_cast<int>(shape.Format)) {
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
      return shape.NumChannels * 2;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
      return shape.NumChannels * 4;
    default:
      return shape.NumChannels;
  }
}

/// What a CUarray points at: a block of the GPU, with rows and planes one after the other. How a GPU lays an array out is
/// in no document, so what it takes is an estimate.
struct Array {
  CUDA_ARRAY3D_DESCRIPTOR shape{};  ///< Height and Depth are 0 where the array has no such dimension
  CUdeviceptr block = 0;

  size_t row_bytes() const { return shape.Width * element_bytes(shape); }
  size_t rows() const { return shape.Height ? shape.Height : 1; }
  size_t planes() const { return shape.Depth ? shape.Depth : 1; }
};

inline Array* find_array(CUarray handle) { return reinterpret_cast<Array*>(handle); }

/// What a texture or a surface object points at.
struct View {
  CUDA_RESOURCE_DESC resource{};
  CUDA_TEXTURE_DESC texture{};
  CUDA_RESOURCE_VIEW_DESC part{};
};

inline View* find_view(unsigned long long object) { return reinterpret_cast<View*>(object); }

}  // namespace oomdiag
