// Devices, their properties and limits.

#include "extension/virtual_device/driver/device.h"

#include <cstring>

#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/runtime/forgetting.h"
#include "extension/virtual_device/runtime/status.h"

using oomdiag::report;

namespace {

struct Property {
  int cudaDeviceProp::*field;
  CUdevice_attribute attribute;
};

/// The integer fields of cudaDeviceProp, each with the attribute that says the same.
constexpr Property kProperties[] = {
    {&cudaDeviceProp::regsPerBlock, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK},
    {&cudaDeviceProp::warpSize, CU_DEVICE_ATTRIBUTE_WARP_SIZE},
    {&cudaDeviceProp::maxThreadsPerBlock, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK},
    {&cudaDeviceProp::major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR},
    {&cudaDeviceProp::minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR},
    {&cudaDeviceProp::multiProcessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT},
    {&cudaDeviceProp::integrated, CU_DEVICE_ATTRIBUTE_INTEGRATED},
    {&cudaDeviceProp::canMapHostMemory, CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY},
    {&cudaDeviceProp::maxTexture1D, CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH},
    {&cudaDeviceProp::concurrentKernels, CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS},
    {&cudaDeviceProp::ECCEnabled, CU_DEVICE_ATTRIBUTE_ECC_ENABLED},
    {&cudaDeviceProp::pciBusID, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID},
    {&cudaDeviceProp::pciDeviceID, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID},
    {&cudaDeviceProp::pciDomainID, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID},
    {&cudaDeviceProp::tccDriver, CU_DEVICE_ATTRIBUTE_TCC_DRIVER},
    {&cudaDeviceProp::asyncEngineCount, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT},
    {&cudaDeviceProp::unifiedAddressing, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING},
    {&cudaDeviceProp::memoryBusWidth, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH},
    {&cudaDeviceProp::l2CacheSize, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE},
    {&cudaDeviceProp::persistingL2CacheMaxSize, CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE},
    {&cudaDeviceProp::maxThreadsPerMultiProcessor, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR},
    {&cudaDeviceProp::streamPrioritiesSupported, CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED},
    {&cudaDeviceProp::globalL1CacheSupported, CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED},
    {&cudaDeviceProp::localL1CacheSupported, CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED},
    {&cudaDeviceProp::regsPerMultiprocessor, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR},
    {&cudaDeviceProp::managedMemory, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY},
    {&cudaDeviceProp::pageableMemoryAccess, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS},
    {&cudaDeviceProp::concurrentManagedAccess, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS},
    {&cudaDeviceProp::computePreemptionSupported, CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED},
    {&cudaDeviceProp::canUseHostPointerForRegisteredMem, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM},
    {&cudaDeviceProp::cooperativeLaunch, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH},
    {&cudaDeviceProp::maxBlocksPerMultiProcessor, CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR},
    {&cudaDeviceProp::hostRegisterSupported, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED},
    {&cudaDeviceProp::memoryPoolsSupported, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED},
    {&cudaDeviceProp::clusterLaunch, CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH},
    {&cudaDeviceProp::ipcEventSupported, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED},
};

int attribute_of(int ordinal, CUdevice_attribute attribute) {
  int value = 0;
  cuDeviceGetAttribute(&value, attribute, ordinal);
  return value;
}

size_t bytes_of(int ordinal, CUdevice_attribute attribute) {
  return static_cast<size_t>(attribute_of(ordinal, attribute));
}

void fill_sizes(cudaDeviceProp& properties, int ordinal) {
  cuDeviceTotalMem(&properties.totalGlobalMem, ordinal);
  properties.sharedMemPerBlock = bytes_of(ordinal, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
  properties.sharedMemPerBlockOptin = bytes_of(ordinal, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  properties.sharedMemPerMultiprocessor = bytes_of(ordinal, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  properties.reservedSharedMemPerBlock = bytes_of(ordinal, CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK);
  properties.totalConstMem = bytes_of(ordinal, CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY);
  properties.memPitch = bytes_of(ordinal, CU_DEVICE_ATTRIBUTE_MAX_PITCH);
  properties.textureAlignment = bytes_of(ordinal, CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT);
  properties.texturePitchAlignment = bytes_of(ordinal, CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT);
  properties.surfaceAlignment = bytes_of(ordinal, CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT);
}

void fill_dimensions(cudaDeviceProp& properties, int ordinal) {
  for (int axis = 0; axis < 3; ++axis) {
    properties.maxThreadsDim[axis] =
        attribute_of(ordinal, static_cast<CUdevice_attribute>(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + axis));
    properties.maxGridSize[axis] =
        attribute_of(ordinal, static_cast<CUdevice_attribute>(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + axis));
  }
}

}  // namespace

OOMDIAG_ENTRY_POINT cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  oomdiag::load_forgetting();
  const CUresult error = oomdiag::initialize();
  return report(error ? error : cuDeviceGetCount(count));
}

// By hand: their header, cuda_profiler_api.h, is in a package that torch does not bring.
OOMDIAG_ENTRY_POINT cudaError_t cudaProfilerStart() { return cudaSuccess; }
OOMDIAG_ENTRY_POINT cudaError_t cudaProfilerStop() { return cudaSuccess; }

OOMDIAG_ENTRY_POINT cudaError_t cudaGetDevice(int* ordinal) {
  oomdiag::poll_forgetting();
  *ordinal = oomdiag::current_ordinal();
  return cudaSuccess;
}

/// Since CUDA 12 choosing a device makes its context (cuda_runtime_api.h, cudaSetDevice).
OOMDIAG_ENTRY_POINT cudaError_t cudaSetDevice(int ordinal) {
  const CUresult error = oomdiag::initialize();
  return report(error ? error : oomdiag::choose_device(ordinal));
}

OOMDIAG_ENTRY_POINT cudaError_t cudaInitDevice(int ordinal, unsigned, unsigned) {
  if (const CUresult error = oomdiag::initialize()) return report(error);
  CUcontext context = nullptr;
  return report(cuDevicePrimaryCtxRetain(&context, ordinal));
}

OOMDIAG_ENTRY_POINT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int ordinal) {
  if (const CUresult error = oomdiag::initialize()) return report(error);
  *properties = {};
  if (const CUresult error = cuDeviceGetName(properties->name, sizeof properties->name, ordinal)) return report(error);
  cuDeviceGetUuid(&properties->uuid, ordinal);
  for (const Property& property : kProperties) properties->*property.field = attribute_of(ordinal, property.attribute);
  fill_sizes(*properties, ordinal);
  fill_dimensions(*properties, ordinal);
  return cudaSuccess;
}

OOMDIAG_ENTRY_POINT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  return oomdiag::in_context([&] {
    CUcontext context = nullptr;
    const CUresult error = cuDevicePrimaryCtxRetain(&context, peer);
    return error ? error : cuCtxEnablePeerAccess(context, flags);
  });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  return oomdiag::in_context([&] {
    CUcontext context = nullptr;
    const CUresult error = cuDevicePrimaryCtxRetain(&context, peer);
    return error ? error : cuCtxDisablePeerAccess(context);
  });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                                                 unsigned long long flags,
                                                                 cudaDriverEntryPointQueryResult* result) {
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
  const CUresult error = cuGetProcAddress(name, function, static_cast<int>(version), flags, &status);
  if (result) *result = static_cast<cudaDriverEntryPointQueryResult>(status);  // they share their numbers
  return report(error);
}
