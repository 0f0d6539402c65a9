// Variables of the device: registered by code that nvcc made, placed when somebody asks, copied to and from.

#include <algorithm>
#include <cstdlib>
#include <unordered_map>

#include "extension/virtual_device/driver/locks.h"
#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/runtime/forward.h"

namespace {

struct Variable {
  size_t bytes = 0;
  void* block = nullptr;  // made at the first question for its address, and at the first after a reset
  bool is_hosts = false;  // it is managed: there before CUDA, and whatever becomes of the context
};

/// Whether the block is still there: a reset takes it.
bool is_placed(const Variable& variable) {
  CUdeviceptr begin = 0;
  const auto address = reinterpret_cast<CUdeviceptr>(variable.block);
  return variable.is_hosts ||
         (variable.block && !cuPointerGetAttribute(&begin, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address));
}

// Never destroyed.
auto& lock = *new oomdiag::LibraryLock;
auto& variables = *new std::unordered_map<const void*, Variable>;

}  // namespace

/// Host-readable zeros: a variable of the device that no kernel ever wrote.
CUresult oomdiag::place_variable(const void* symbol, void** address, size_t* bytes) {
  std::lock_guard guard(lock);
  const auto entry = variables.find(symbol);
  if (entry == variables.end()) return CUDA_ERROR_NOT_FOUND;
  Variable& variable = entry->second;
  if (bytes) *bytes = variable.bytes;
  if (!address) return CUDA_SUCCESS;
  CUresult error = CUDA_SUCCESS;
  if (!is_placed(variable)) {
    error = cuMemAllocManaged(reinterpret_cast<CUdeviceptr*>(&variable.block), std::max<size_t>(variable.bytes, 1),
                              CU_MEM_ATTACH_GLOBAL);
  }
  *address = variable.block;
  return error;
}

OOMDIAG_ENTRY_POINT void __cudaRegisterVar(void**, char* symbol, char*, const char*, int, size_t bytes, int, int) {
  std::lock_guard guard(lock);
  variables[symbol].bytes = bytes;
}

OOMDIAG_ENTRY_POINT void __cudaRegisterManagedVar(void**, void** symbol, char*, const char*, int, size_t bytes, int,
                                                  int) {
  std::lock_guard guard(lock);
  auto& variable = variables[symbol];
  variable = {.bytes = bytes, .block = std::calloc(1, std::max<size_t>(bytes, 1)), .is_hosts = true};
  *symbol = variable.block;  // through which the program reads and writes it, before CUDA is initialised, too
}
