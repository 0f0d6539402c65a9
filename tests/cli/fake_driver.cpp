// A CUDA driver that reports one GPU, for machines that have none: what oomdiag asks of libcuda.so.1 is answered, and nothing
// can be run on it. $FAKE_GPU_NAME names the GPU.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// CUresult and CUdevice are ints (cuda.h).
namespace {
constexpr int kSuccess = 0, kInvalidValue = 1, kInvalidDevice = 101, kNotSupported = 801;
constexpr std::size_t kMemory = std::size_t{12} << 30;
}  // namespace

#define DRIVER_CALL extern "C" __attribute__((visibility("default"))) int

DRIVER_CALL cuInit(unsigned) { return kSuccess; }
DRIVER_CALL cuDriverGetVersion(int* version) {
  *version = 13020;
  return kSuccess;
}
DRIVER_CALL cuDeviceGetCount(int* count) {
  *count = 1;
  return kSuccess;
}
DRIVER_CALL cuDeviceGet(int* device, int ordinal) {
  if (ordinal != 0) return kInvalidDevice;
  *device = 0;
  return kSuccess;
}
DRIVER_CALL cuDeviceGetName(char* name, int length, int) {
  if (length <= 0) return kInvalidValue;
  const char* const chosen = std::getenv("FAKE_GPU_NAME");
  std::snprintf(name, static_cast<std::size_t>(length), "%s", chosen == nullptr ? "NVIDIA GeForce RTX 3060" : chosen);
  return kSuccess;
}
DRIVER_CALL cuDeviceTotalMem_v2(std::size_t* bytes, int) {
  *bytes = kMemory;
  return kSuccess;
}
DRIVER_CALL cuDeviceGetAttribute(int* value, int, int) {
  *value = 0;
  return kSuccess;
}
DRIVER_CALL cuGetErrorString(int, const char** text) {
  *text = "not supported by the fake driver";
  return kSuccess;
}
DRIVER_CALL cuGetErrorName(int, const char** text) {
  *text = "CUDA_ERROR_NOT_SUPPORTED";
  return kSuccess;
}
DRIVER_CALL cuGetProcAddress_v2(const char*, void** function, int, unsigned long long, int*) {
  *function = nullptr;
  return kNotSupported;
}
