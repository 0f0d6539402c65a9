#include "extension/record/process_facts.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "extension/environment.h"
#include "extension/record/python.h"
#include "extension/torch_version.h"
#include "profiler/trace/format.h"

// As in ATen/cuda/CUDAContextLight.h, which wants headers of the toolkit that no wheel of torch brings. Not every torch
// exports the second one (2.12 does not): null there.
namespace at::cuda {
cudaDeviceProp* getDeviceProperties(c10::DeviceIndex device);
extern __attribute__((weak)) size_t getChosenWorkspaceSize();
}  // namespace at::cuda

namespace oomdiag {
namespace {

template <size_t N>
void copy_text(char (&field)[N], const std::string& text) {
  std::strncpy(field, text.c_str(), N - 1);
}

// Arguments are separated by NUL in /proc.
std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), {});
  while (!text.empty() && text.back() == '\0') text.pop_back();
  for (char& c : text) {
    if (c == '\0') c = ' ';
  }
  return text;
}

void describe_device(TraceHeader& header, uint32_t index) {
  DeviceInfo& device = header.devices[index];
  const auto* properties = at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(index));
  copy_text(device.name, properties->name);
  device.total_bytes = static_cast<int64_t>(properties->totalGlobalMem);
  device.compute_major = properties->major;
  device.compute_minor = properties->minor;
  using ContextBytes = int64_t (*)(int);
  const auto modelled = reinterpret_cast<ContextBytes>(dlsym(RTLD_DEFAULT, "oomdiag_device_context_bytes"));
  if (modelled != nullptr) device.context_bytes = modelled(static_cast<int>(index));
  if (at::cuda::getChosenWorkspaceSize != nullptr) {
    device.cublas_workspace_bytes = static_cast<int64_t>(at::cuda::getChosenWorkspaceSize());
  }
}

}  // namespace

void describe_process(TraceHeader& header) {
  const char* settings = variables::text("PYTORCH_CUDA_ALLOC_CONF");
  if (*settings == '\0') settings = variables::text("PYTORCH_ALLOC_CONF");
  copy_text(header.allocator_settings, settings);
  copy_text(header.torch_version, loaded_torch_version());
  copy_text(header.command, command_line());
  header.rank = static_cast<int>(variables::number("RANK", 0));
  header.world_size = static_cast<int>(variables::number("WORLD_SIZE", 1));
  header.python = python_attached() ? 1 : 0;
  header.virtual_device = dlsym(RTLD_DEFAULT, "oomdiag_device_set_observer") != nullptr ? 1 : 0;
  for (uint32_t d = 0; d < header.device_count; ++d) describe_device(header, d);
}

// Allocators other than the native one throw where a hook is attached; without caching the hooks are attached and never
// called.
const char* find_allocator_obstacle() {
  if (std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING") != nullptr) {
    return "PYTORCH_NO_CUDA_MEMORY_CACHING is set, and PyTorch reports nothing of allocations that it does not cache: "
           "how the program ended is all that is known; unset it for a diagnosis";
  }
  const std::string name = c10::cuda::CUDACachingAllocator::get()->name();
  if (name == "native") return nullptr;
  if (name == "cudaMallocAsync") {
    return "backend:cudaMallocAsync reports nothing of single allocations: its totals are known, who holds them is "
           "not; "
           "take backend:native for a diagnosis";
  }
  return "a pluggable allocator reports nothing of its allocations: how the program ended is all that is known; take "
         "PyTorch's own for a diagnosis";
}

}  // namespace oomdiag
