// The real cuDNN, without a device.
//
// Since 9.8 cuDNN chooses algorithms, and sizes their workspaces, for a device that is only described ("Deviceless
// ahead-of-time compilation", cuDNN Frontend documentation): a DEVICEPROP descriptor, made from JSON, takes the place
// of the handle. So the answers that decide the memory of a convolution or an attention are cuDNN's own, for the GPU
// that the program sees.
//
//   PyTorch, cudnn_frontend                 this library                           the real libcudnn.so.9
//   cudnnCreate                     ──►     a handle of ours; describes the GPU ──► DEVICEPROP descriptor, once
//   OPERATIONGRAPH_HANDLE           ──►     swallowed
//   EXECUTION_PLAN_HANDLE           ──►     EXECUTION_PLAN_DEVICEPROP            ──► plan, workspace bytes
//   finalize ENGINE, ENGINEHEUR     ──►     sets their DEVICEPROP first          ──► list of engines
//   cudnnBackendExecute             ──►     the time of the plan (one node of a capture)
//   all other backend functions     ───────────────────────────────────────────►   unchanged
//
// An older one, as torch 2.6 and 2.7 bring it, is not asked from the graph on: before_9_8.cpp.
//
// This library is preloaded and has cuDNN's version node, libcudnn.so.9, but a SONAME of its own: programs bind to the
// functions that it defines, and find all others in the real library, which must be there. What takes a handle and has
// no such route is in entry_points.txt and rnn.cpp, or a generated stub: a handle of ours must never reach the real
// library. Who looks functions up by cuDNN's name gets them by way of open.cpp.

#include <cudnn.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "extension/virtual_device/dnn/amount.h"
#include "extension/virtual_device/dnn/before_9_8.h"
#include "extension/virtual_device/dnn/descriptors.h"
#include "extension/virtual_device/dnn/handle.h"
#include "extension/virtual_device/dnn/real.h"
#include "extension/virtual_device/dnn/shared_tiles.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/locks.h"
#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/stubs/handle.h"

namespace oomdiag {
namespace {

// Never destroyed: descriptors are destroyed by static destructors too.
auto& descriptors = *new Descriptors;

cudnnStatus_t describe(const char* json, cudnnBackendDescriptor_t* description) {
  const auto create = OOMDIAG_REAL(cudnnBackendCreateDescriptor);
  const auto set = OOMDIAG_REAL(cudnnBackendSetAttribute);
  if (const auto error = create(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, description)) return error;
  const auto length = static_cast<int64_t>(std::strlen(json));
  if (const auto error = set(*description, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, length, json))
    return error;
  return OOMDIAG_REAL(cudnnBackendFinalize)(*description);
}

/// The description of the GPU of `ordinal`; one descriptor for each, for the life of the process.
cudnnStatus_t find_description(int ordinal, cudnnBackendDescriptor_t* description) {
  static auto& lock = *new oomdiag::LibraryLock;
  static auto& made = *new std::unordered_map<int, cudnnBackendDescriptor_t>;
  std::lock_guard guard(lock);
  if (const auto entry = made.find(ordinal); entry != made.end()) {
    *description = entry->second;
    return CUDNN_STATUS_SUCCESS;
  }
  const char* json = oomdiag_device_cudnn_description(ordinal);
  if (!json) return CUDNN_STATUS_NOT_INITIALIZED;
  const cudnnStatus_t result = describe(json, description);
  if (result == CUDNN_STATUS_SUCCESS) made[ordinal] = *description;
  return result;
}

/// Gives `descriptor` the description of the thread's device.
cudnnStatus_t attach_description(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t attribute) {
  int ordinal = 0;
  cudaGetDevice(&ordinal);
  cudnnBackendDescriptor_t description = nullptr;
  if (const auto error = find_description(ordinal, &description)) return error;
  return OOMDIAG_REAL(cudnnBackendSetAttribute)(descriptor, attribute, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &description);
}

/// What the plan wants where it runs, for what cuDNN says of a GPU that is only described. Seen on an H200 only, which has as many
/// multiprocessors as an H100.
int64_t workspace_of_plan(cudnnBackendDescriptor_t plan, int64_t bytes) {
  constexpr int kHopper = 9, kMultiprocessors = 132;
  CUdevice device = 0;
  int major = 0, multiprocessors = 0;
  BlockShape block;
  const auto product = descriptors.product(plan);
  if (!product || cuCtxGetDevice(&device)) return bytes;
  cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  cuDeviceGetAttribute(&multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
  if (major != kHopper || multiprocessors != kMultiprocessors || !read_block_shape(plan, &block)) return bytes;
  return find_workspace_of_shared_tiles(*product, block, bytes);
}

/// Whether cuDNN cannot be asked about `descriptor` without a GPU.
bool is_answered_here(cudnnBackendDescriptor_t descriptor) {
  return chooses_on_gpus_only() && is_step_of_choice(descriptors.type(descriptor));
}

}  // namespace

void* find_real(const char* name) {
  static void* library = find_real_library();
  if (void* function = library ? dlsym(library, name) : nullptr) return function;
  std::fprintf(stderr, "oomdiag: virtual device: the loaded cuDNN has no %s\n", name);
  std::abort();
}

cudnnStatus_t submit_work(cudnnHandle_t handle, const Amount& amount) {
  if (!handle) return CUDNN_STATUS_BAD_PARAM;
  const CUresult error = oomdiag_device_compute(find_handle(handle)->stream, amount.memory_bytes, amount.flops);
  return error ? CUDNN_STATUS_EXECUTION_FAILED : CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t give_estimate(const char* name, size_t* place, size_t bytes) {
  oomdiag_device_note("estimate", name);
  if (place) *place = bytes;
  return CUDNN_STATUS_SUCCESS;
}

}  // namespace oomdiag

/// What the stubs of functions that only compute do.
extern "C" int oomdiag_compute(void* handle) { return oomdiag::submit_work(static_cast<cudnnHandle_t>(handle)); }

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  constexpr auto kNoMemory = CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED;
  if (const auto error = oomdiag::use_library(kNoMemory, CUDNN_STATUS_NOT_INITIALIZED)) return error;
  int ordinal = 0;
  cudaGetDevice(&ordinal);
  cudnnBackendDescriptor_t description = nullptr;
  if (!oomdiag::chooses_on_gpus_only()) {
    if (const auto error = oomdiag::find_description(ordinal, &description)) return error;
  }
  *handle = reinterpret_cast<cudnnHandle_t>(new oomdiag::DnnHandle);
  return CUDNN_STATUS_SUCCESS;
}

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                                               cudnnBackendDescriptor_t* descriptor) {
  const cudnnStatus_t result = OOMDIAG_REAL(cudnnBackendCreateDescriptor)(type, descriptor);
  if (result == CUDNN_STATUS_SUCCESS) oomdiag::descriptors.add(*descriptor, type);
  return result;
}

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  oomdiag::descriptors.remove(descriptor);
  return OOMDIAG_REAL(cudnnBackendDestroyDescriptor)(descriptor);
}

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                                           cudnnBackendAttributeName_t attribute,
                                                           cudnnBackendAttributeType_t type, int64_t count,
                                                           const void* elements) {
  if (attribute == CUDNN_ATTR_OPERATIONGRAPH_HANDLE) return CUDNN_STATUS_SUCCESS;
  const bool is_ours = oomdiag::is_answered_here(descriptor);
  if (attribute == CUDNN_ATTR_EXECUTION_PLAN_HANDLE && !is_ours) {
    return oomdiag::attach_description(descriptor, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP);
  }
  oomdiag::descriptors.set(descriptor, attribute, type, count, elements);
  if (is_ours) return CUDNN_STATUS_SUCCESS;
  return OOMDIAG_REAL(cudnnBackendSetAttribute)(descriptor, attribute, type, count, elements);
}

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t descriptor,
                                                           cudnnBackendAttributeName_t attribute,
                                                           cudnnBackendAttributeType_t type, int64_t requested,
                                                           int64_t* count, void* elements) {
  const auto result =
      oomdiag::is_answered_here(descriptor)
          ? oomdiag::answer_choice(attribute, requested, count, elements)
          : OOMDIAG_REAL(cudnnBackendGetAttribute)(descriptor, attribute, type, requested, count, elements);
  if (attribute == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE && result == CUDNN_STATUS_SUCCESS && elements &&
      !oomdiag::is_answered_here(descriptor)) {
    auto* const bytes = static_cast<int64_t*>(elements);
    *bytes = oomdiag::workspace_of_plan(descriptor, *bytes);
  }
  if (attribute == CUDNN_ATTR_ENGINEHEUR_RESULTS && result == CUDNN_STATUS_SUCCESS && elements && count) {
    oomdiag::descriptors.pass_on(descriptor, {static_cast<cudnnBackendDescriptor_t*>(elements),
                                              static_cast<size_t>(std::min(requested, *count))});
  }
  return result;
}

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  if (oomdiag::is_answered_here(descriptor)) return CUDNN_STATUS_SUCCESS;
  const auto type = oomdiag::descriptors.type(descriptor);
  if (type == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR) {
    oomdiag::attach_description(descriptor, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP);
  } else if (type == CUDNN_BACKEND_ENGINE_DESCRIPTOR) {
    oomdiag::attach_description(descriptor, CUDNN_ATTR_ENGINE_DEVICEPROP);
  }
  return OOMDIAG_REAL(cudnnBackendFinalize)(descriptor);
}

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                                      cudnnBackendDescriptor_t tensors) {
  if (oomdiag::descriptors.is_comparison(plan, tensors)) {
    oomdiag_device_note("estimate",
                        "workspaces under cudnn.benchmark: a GPU takes the fastest plan, here it is cuDNN's first");
  }
  return oomdiag::submit_work(handle, oomdiag::descriptors.amount(plan));
}
