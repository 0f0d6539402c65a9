#include <ATen/ATen.h>
#include <oomdiag/oomdiag.h>

#include <iostream>

int main() {
  oomdiag::start();
  const at::Tensor weights = at::zeros({1024, 1024}, at::device(at::kCUDA));
  oomdiag::mark("weights are there");
  try {
    at::zeros({1024, 1024, 1024, 16}, at::device(at::kCUDA));
  } catch (const c10::OutOfMemoryError&) {
    std::cout << oomdiag::explain();
  }
  std::cout << "peak " << oomdiag::peak()["allocated_bytes"] << "\n";
}
