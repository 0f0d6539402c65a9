#include "cli/device/real_gpu.h"

#include <dlfcn.h>

#include <array>

#include "cli/process/workers.h"

namespace oomdiag {
namespace {

/// From the documented driver API (cuda.h): all return CUDA_SUCCESS = 0.
std::string ask_driver() {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return {};
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  const auto get_count = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDeviceGetCount"));
  const auto get_name = reinterpret_cast<int (*)(char*, int, int)>(dlsym(driver, "cuDeviceGetName"));
  if (init == nullptr || get_count == nullptr || get_name == nullptr || init(0) != 0) return {};
  int count = 0;
  if (get_count(&count) != 0 || count == 0) return {};
  std::array<char, 256> name{};
  return get_name(name.data(), static_cast<int>(name.size()) - 1, 0) == 0 ? name.data() : "";
}

}  // namespace

std::string name_of_real_gpu() {
  return run_in_processes({ask_driver}, 1, [](std::size_t) {}).front().value_or("");
}

}  // namespace oomdiag
