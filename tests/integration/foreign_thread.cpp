// A library that runs torch on a thread which Python does not know, and joins it while its caller holds the GIL. A recorder
// that took the GIL on such a thread would never come back. (No backward: the autograd engine itself takes the GIL then.)

#include <ATen/ATen.h>

#include <thread>

extern "C" __attribute__((visibility("default"))) void run_on_foreign_thread() {
  std::thread([] {
    const auto x = at::randn({64, 64}, at::device(at::kCUDA).requires_grad(true));
    at::mm(x, x).relu().sum();
  }).join();
}
