#include "extension/virtual_device/driver/module.h"

#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "extension/virtual_device/device_files/gpu.h"
#include "extension/virtual_device/driver/code.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/locks.h"
#include "extension/virtual_device/driver/memory.h"

namespace oomdiag {
namespace {

constexpr int64_t kUnknownGlobalBytes = 64 << 10;  // of a variable in code whose names are not known

// Never destroyed, under the lock.
auto& module_lock = *new LibraryLock;
auto& modules = *new std::unordered_map<const void*, std::unique_ptr<Module>>;
auto& kernels_by_handle = *new std::unordered_map<const void*, const Kernel*>;
auto& opted_in = *new std::unordered_map<const void*, int>;

void free_module(const Module& module) {
  for (const auto& [name, kernel] : module.kernels) {
    kernels_by_handle.erase(&kernel);
    opted_in.erase(&kernel);
  }
  for (const auto& [name, global] : module.globals) free_block(reinterpret_cast<void*>(global.address));
}

Module* find_module(const void* handle) {
  const auto entry = modules.find(handle);
  return entry == modules.end() ? nullptr : entry->second.get();
}

void note_unknown_names() {
  oomdiag_device_note("estimate", "kernels and variables of fat binaries: whether a name exists is not known");
}

/// The bytes of a variable; 0 where the code has none of that name.
int64_t bytes_of_global(const Code& code, const std::string& name) {
  if (!code.names) return kUnknownGlobalBytes;
  const auto entry = code.names->globals.find(name);
  return entry == code.names->globals.end() ? 0 : std::max<int64_t>(entry->second, 1);
}

}  // namespace

Module* add_module(Code code, Context* context) {
  std::lock_guard guard(module_lock);
  auto module = std::make_unique<Module>(Module{.code = std::move(code), .context = context});
  Module* handle = module.get();
  modules.emplace(handle, std::move(module));
  return handle;
}

CUresult unload_module(const void* handle) {
  std::lock_guard guard(module_lock);
  const auto entry = modules.find(handle);
  if (entry == modules.end()) return CUDA_ERROR_INVALID_HANDLE;
  free_module(*entry->second);
  modules.erase(entry);
  return CUDA_SUCCESS;
}

void unload_modules_of(const Context& context) {
  std::lock_guard guard(module_lock);
  std::erase_if(modules, [&](const auto& entry) {
    if (entry.second->context != &context) return false;
    free_module(*entry.second);
    return true;
  });
}

CUresult find_kernel(const void* handle, const char* name, const Kernel** kernel) {
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard guard(module_lock);
  Module* module = find_module(handle);
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  if (!module->code.names) note_unknown_names();
  if (module->code.names && !module->code.names->kernels.contains(name)) return CUDA_ERROR_NOT_FOUND;
  const Kernel& found = module->kernels.try_emplace(name, Kernel{.name = name, .module = module}).first->second;
  kernels_by_handle[&found] = &found;
  *kernel = &found;
  return CUDA_SUCCESS;
}

CUresult find_global(const void* handle, const char* name, Global* global) {
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard guard(module_lock);
  Module* module = find_module(handle);
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  const int64_t bytes = bytes_of_global(module->code, name);
  if (bytes == 0) return CUDA_ERROR_NOT_FOUND;
  Global& found = module->globals[name];
  if (found.address == 0) {
    void* block = nullptr;
    const Device* device = module->context ? module->context->device : current_device();
    if (const CUresult error = allocate_managed(device ? device->ordinal : 0, bytes, &block)) return error;
    found = {.address = reinterpret_cast<CUdeviceptr>(block), .bytes = static_cast<size_t>(bytes)};
  }
  *global = found;
  return CUDA_SUCCESS;
}

const Kernel* known_kernel(const void* handle) {
  std::lock_guard guard(module_lock);
  const auto entry = kernels_by_handle.find(handle);
  return entry == kernels_by_handle.end() ? nullptr : entry->second;
}

int dynamic_shared_bytes(const Gpu& gpu, const void* kernel) {
  std::lock_guard guard(module_lock);
  const auto entry = opted_in.find(kernel);
  return entry == opted_in.end() ? gpu.shared_bytes_per_block : entry->second;
}

CUresult set_dynamic_shared_bytes(const Gpu& gpu, const void* kernel, int bytes) {
  if (bytes < 0 || bytes > gpu.shared_bytes_per_block_optin) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard guard(module_lock);
  opted_in[kernel] = bytes;
  return CUDA_SUCCESS;
}

}  // namespace oomdiag
