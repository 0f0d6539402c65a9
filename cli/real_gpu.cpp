#include "cli/real_gpu.h"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

namespace oomdiag {
namespace {

/// From the documented driver API (cuda.h): both return CUDA_SUCCESS = 0.
bool driver_shows_device() {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return false;
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  const auto get_count = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDeviceGetCount"));
  int count = 0;
  return init != nullptr && get_count != nullptr && init(0) == 0 && get_count(&count) == 0 && count > 0;
}

}  // namespace

bool has_real_gpu() {
  const pid_t child = fork();
  if (child < 0) return false;
  if (child == 0) _exit(driver_shows_device() ? 0 : 1);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace oomdiag
