#pragma once

// A library of CUDA has the major version of CUDA in its name and in the version node of what it exports, and a program asks
// for either. Whoever stands before such a library therefore has each function once for each major: two classes, which say
// whose library is meant, and OOMDIAG_OF_CUDA_12, which gives a function the name that programs of CUDA 12 ask for.

namespace oomdiag {

/// cudaErrorInsufficientDriver: what a program without a runtime would see.
inline constexpr int kErrorInsufficientDriver = 35;

struct Cuda12 {
  static constexpr const char* kRuntime = "libcudart.so.12";
  static constexpr const char* kCupti = "libcupti.so.12";
};

struct Cuda13 {
  static constexpr const char* kRuntime = "libcudart.so.13";
  static constexpr const char* kCupti = "libcupti.so.13";
};

}  // namespace oomdiag

/// `own` is exported as `name` of this library's version node for CUDA 12 (preload.map).
#define OOMDIAG_OF_CUDA_12(own, name, library) __asm__(".symver " #own ", " name "@" library ".so.12")
