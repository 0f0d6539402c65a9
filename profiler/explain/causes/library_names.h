#pragma once

#include <string_view>
#include <utility>

namespace oomdiag {

/// "cuBLAS" of "cublasCreate_v2" or "cublas.so.13": what people call the library that functions and files begin with; empty for
/// none of NVIDIA's.
constexpr std::string_view library_called(std::string_view text) {
  constexpr std::pair<std::string_view, std::string_view> kLibraries[] = {
      {"cudnn", "cuDNN"},       {"cublas", "cuBLAS"},     {"cufft", "cuFFT"},
      {"cusolver", "cuSOLVER"}, {"cusparse", "cuSPARSE"}, {"curand", "cuRAND"},
      {"nccl", "NCCL"},         {"nvml", "NVML"},         {"nvrtc", "NVRTC"}};
  for (const auto& [begin, name] : kLibraries) {
    if (text.starts_with(begin)) return name;
  }
  return {};
}

}  // namespace oomdiag
