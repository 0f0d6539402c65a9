// Runs a scripted module that calls torch.ops.oomdiag.*, and the same functions through their C++ header: oomdiag_test_scripted
// MODULE.pt FOLDER. Prints the module's answer, then the peaks.

#include <torch/cuda.h>
#include <torch/script.h>

#include <iostream>

#include "extension/oomdiag.h"

int main(int, char** arguments) {
  if (torch::cuda::device_count() == 0) return 99;
  const std::string trace = oomdiag::start(arguments[2]);
  auto module = torch::jit::load(arguments[1]);
  module.to(at::kCUDA);
  const auto x = at::ones({64, 256}, at::device(at::kCUDA));
  std::cout << module.forward({x}).toStringRef() << '\n';
  oomdiag::mark("after the module");
  oomdiag::stop();
  const auto peak = oomdiag::peak();
  std::cout << peak.at("allocated_bytes") << ' ' << peak.at("reserved_bytes") << '\n';
  try {
    at::empty({int64_t{1} << 40}, at::device(at::kCUDA));
  } catch (const c10::OutOfMemoryError&) {
    std::cout << oomdiag::explain() << '\n';
  }
  return 0;
}
