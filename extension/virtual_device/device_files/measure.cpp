// oomdiag_measure: prints the device file of the machine's first GPU, as `oomdiag devices --measure` hands it on. Where that
// cannot be, {"error": "…"}.
//
// Documented calls only, of libraries that are opened when they are asked for, so that it builds and starts without them:
// the driver says what the GPU is, the runtime how much memory it has, NVML what is taken of it, before and after the
// context is made, and after a first kernel and a cuBLAS handle.

#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "extension/nvml.h"

namespace {

using nlohmann::ordered_json;

void* open_any(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (void* library = dlopen(name, RTLD_NOW)) return library;
  }
  return nullptr;
}

/// The function `name`; null if the library or the name is not there.
template <typename Function>
Function* find(void* library, const char* name) {
  return library ? reinterpret_cast<Function*>(dlsym(library, name)) : nullptr;
}

void* driver() {
  static void* library = open_any({"libcuda.so.1"});
  if (!library) throw std::runtime_error("no NVIDIA driver: libcuda.so.1 is not there");
  return library;
}

/// Calls a driver function; throws where it fails.
template <typename Function, typename... Arguments>
void ask(const char* name, Arguments... arguments) {
  auto* function = find<Function>(driver(), name);
  const CUresult error = function ? function(arguments...) : CUDA_ERROR_NOT_FOUND;
  if (error) throw std::runtime_error(std::string(name) + " answers error " + std::to_string(error));
}
#define OOMDIAG_TEXT(name) #name
#define OOMDIAG_ASK(function, ...) ask<decltype(function)>(OOMDIAG_TEXT(function), __VA_ARGS__)

class Nvml {
 public:
  explicit Nvml(CUdevice gpu) {
    char bus[32] = "";
    OOMDIAG_ASK(cuDeviceGetPCIBusId, bus, static_cast<int>(sizeof bus), gpu);
    is_there_ = library_.open() && library_.by_bus(bus, &device_) == NVML_SUCCESS;
  }

  /// The bytes taken of the GPU by all processes; -1 if NVML does not say.
  int64_t used_bytes() const { return is_there_ ? library_.used_on(device_) : -1; }

  std::string driver_version() const {
    char text[96] = "unknown";
    if (is_there_ && library_.driver_version) library_.driver_version(text, sizeof text);
    return text;
  }

 private:
  oomdiag::NvmlLibrary library_;
  bool is_there_ = false;
  nvmlDevice_t device_ = nullptr;
};

/// The memory as the runtime reports it, which is what PyTorch calls the capacity.
int64_t measure_total(CUdevice gpu) {
  void* runtime = open_any({"libcudart.so.13", OOMDIAG_CUDA_LIBRARIES "/libcudart.so.13", "libcudart.so.12"});
  size_t free = 0;
  size_t total = 0;
  auto* read = find<cudaError_t(size_t*, size_t*)>(runtime, "cudaMemGetInfo");
  if (!read || read(&free, &total)) OOMDIAG_ASK(cuDeviceTotalMem, &total, gpu);
  return static_cast<int64_t>(total);
}

/// What a first kernel loads: the smallest there is, in PTX, and a cuBLAS handle where that library can be found.
void use_gpu() {
  constexpr const char* kKernel = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry nothing() { ret; }\n";
  CUmodule module = nullptr;
  CUfunction kernel = nullptr;
  OOMDIAG_ASK(cuModuleLoadData, &module, kKernel);
  OOMDIAG_ASK(cuModuleGetFunction, &kernel, module, "nothing");
  OOMDIAG_ASK(cuLaunchKernel, kernel, 1U, 1U, 1U, 1U, 1U, 1U, 0U, nullptr, nullptr, nullptr);
  void* blas = open_any({"libcublas.so.13", OOMDIAG_CUDA_LIBRARIES "/libcublas.so.13", "libcublas.so.12"});
  cublasHandle_t handle = nullptr;
  if (auto* create = find<cublasStatus_t(cublasHandle_t*)>(blas, "cublasCreate_v2")) create(&handle);
}

ordered_json number(int64_t value, const char* source) { return {{"value", value}, {"mark", "M"}, {"source", source}}; }

/// "rtx-4090" of "NVIDIA GeForce RTX 4090".
std::string make_id(std::string name) {
  for (const char* prefix : {"NVIDIA ", "GeForce ", "Tesla "}) {
    if (name.starts_with(prefix)) name.erase(0, std::string(prefix).size());
  }
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char letter) {
    return std::isalnum(letter) ? static_cast<char>(std::tolower(letter)) : '-';
  });
  return name;
}

std::string today() {
  char text[16] = "";
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  std::strftime(text, sizeof text, "%Y-%m-%d", gmtime_r(&now, &parts));
  return text;
}

void add_attributes(ordered_json& file, CUdevice gpu) {
  const auto add = [&](const char* key, CUdevice_attribute attribute) {
    int value = 0;
    OOMDIAG_ASK(cuDeviceGetAttribute, &value, attribute, gpu);
    file[key] = number(value, "cuDeviceGetAttribute");
  };
  add("multiprocessors", CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  add("threads_per_multiprocessor", CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
  add("blocks_per_multiprocessor", CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR);
  add("registers_per_multiprocessor", CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR);
  add("shared_bytes_per_multiprocessor", CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  add("shared_bytes_per_block", CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
  add("shared_bytes_per_block_optin", CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  add("reserved_shared_bytes_per_block", CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK);
  add("l2_bytes", CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
  add("clock_khz", CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
  add("memory_clock_khz", CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE);
  add("memory_bus_bits", CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
}

void describe(ordered_json& file, CUdevice gpu, const Nvml& nvml) {
  char name[256] = "";
  int major = 0, minor = 0;
  OOMDIAG_ASK(cuDeviceGetName, name, static_cast<int>(sizeof name), gpu);
  OOMDIAG_ASK(cuDeviceGetAttribute, &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, gpu);
  OOMDIAG_ASK(cuDeviceGetAttribute, &minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, gpu);
  file["schema"] = "oomdiag-device/1";
  file["id"] = make_id(name);
  file["aliases"] = ordered_json::array();
  file["name"] = name;
  file["note"] = "measured " + today() + " with driver " + nvml.driver_version();
  file["compute_capability"] = {{"value", std::to_string(major) + "." + std::to_string(minor)},
                                {"mark", "M"},
                                {"source", "cuDeviceGetAttribute"}};
}

ordered_json measure() {
  CUdevice gpu = 0;
  OOMDIAG_ASK(cuInit, 0U);
  OOMDIAG_ASK(cuDeviceGet, &gpu, 0);
  const Nvml nvml(gpu);
  ordered_json file;
  describe(file, gpu, nvml);

  const int64_t before = nvml.used_bytes();
  CUcontext context = nullptr;
  OOMDIAG_ASK(cuDevicePrimaryCtxRetain, &context, gpu);
  OOMDIAG_ASK(cuCtxSetCurrent, context);
  const int64_t with_context = nvml.used_bytes();
  file["total_bytes"] = number(measure_total(gpu), "cudaMemGetInfo");
  const int64_t before_kernel = nvml.used_bytes();
  use_gpu();
  const int64_t with_kernel = nvml.used_bytes();
  if (before < 0)
    throw std::runtime_error("NVML does not say how much memory is taken: the context cannot be measured");

  add_attributes(file, gpu);
  file["context_bytes"] =
      number(std::max<int64_t>(with_context - before, 0), "taken of the GPU when the context was made, by NVML");
  file["first_kernel_bytes"] =
      number(std::max<int64_t>(with_kernel - before_kernel, 0),
             "taken by a first kernel and a cuBLAS handle, by NVML; PyTorch's kernels take more");
  return file;
}

/// A line for each number, as the files of the catalogue have it.
void print(const ordered_json& file) {
  const char* separator = "{\n  ";
  for (const auto& [key, value] : file.items()) {
    std::printf("%s\"%s\": %s", separator, key.c_str(), value.dump().c_str());
    separator = ",\n  ";
  }
  std::printf("\n}\n");
}

}  // namespace

int main() {
  try {
    print(measure());
  } catch (const std::exception& error) {
    print({{"error", error.what()}});
  }
  return 0;
}
