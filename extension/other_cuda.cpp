// A program whose torch is for a major version of CUDA that no recorder is made for asks for device counts under that one's
// node: it is passed on, and the launcher hears why there is no report.

#include <dlfcn.h>

#include <atomic>
#include <string>

#include "extension/cuda_major.h"
#include "extension/write_status.h"

namespace {

int ask_other(const char* runtime, const char* major, int* count) {
  static std::atomic<bool> is_reported = false;
  void* torch = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (torch != nullptr) dlclose(torch);
  if (torch != nullptr && !is_reported.exchange(true)) {
    oomdiag::report_not_recording(
        std::string("the program's torch is built for CUDA ") + major +
        ", and oomdiag records with CUDA 12 and 13; take such a torch: pip install torch --index-url "
        "https://download.pytorch.org/whl/cu130");
  }
  void* library = dlopen(runtime, RTLD_NOW | RTLD_NOLOAD);
  void* real = library == nullptr ? nullptr : dlsym(library, "cudaGetDeviceCount");
  return real == nullptr ? oomdiag::kErrorInsufficientDriver : reinterpret_cast<int (*)(int*)>(real)(count);
}

}  // namespace

#define OOMDIAG_FORWARD(function, runtime, major)                             \
  extern "C" __attribute__((visibility("default"))) int function(int* count); \
  __asm__(".symver " #function ", cudaGetDeviceCount@" runtime);              \
  extern "C" int function(int* count) { return ask_other(runtime, major, count); }

OOMDIAG_FORWARD(oomdiag_count_of_cuda_11, "libcudart.so.11.0", "11")
OOMDIAG_FORWARD(oomdiag_count_of_cuda_14, "libcudart.so.14", "14")
