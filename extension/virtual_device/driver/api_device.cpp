// cuInit, devices and what they say of themselves. None of these makes a context.

#include <cuda.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "extension/virtual_device/device_files/gpu.h"
#include "extension/virtual_device/driver/context.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/forward.h"
#include "extension/virtual_device/driver/memory_account.h"
#include "extension/virtual_device/driver/shared_gpus.h"
#include "extension/virtual_device/driver/simulated_processes.h"
#include "extension/virtual_device/driver/uuid.h"
#include "extension/virtual_device/entry_point.h"

using oomdiag::Device;
using oomdiag::find_device;
using oomdiag::Gpu;

namespace {

/// CUDA programming guide, "Arithmetic instructions": 64-bit throughput against 32-bit.
int double_ratio(const Gpu& gpu) {
  const bool is_data_centre = gpu.compute_minor == 0 && gpu.compute_major < 12;
  return is_data_centre ? 2 : gpu.compute_major == 7 ? 32 : 64;
}

struct KnownAttribute {
  CUdevice_attribute attribute;
  int value;
};

/// What every GPU of compute capability 7.5 to 12.0 answers under Linux (CUDA programming guide, compute
/// capabilities); 0 for what is not known, which is what GPUs answer for features that they lack.
constexpr KnownAttribute kCommonAttributes[] = {
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
    {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT, 32},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH, 131072},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH, 131072},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT, 65536},
    {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 2},
    {CU_DEVICE_ATTRIBUTE_NUMA_ID, -1},
    {CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR},
    {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
    {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT, 1},
};

struct GpuAttribute {
  CUdevice_attribute attribute;
  int Gpu::*field;
};

/// What its device file says.
constexpr GpuAttribute kGpuAttributes[] = {
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &Gpu::compute_major},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &Gpu::compute_minor},
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &Gpu::multiprocessors},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, &Gpu::threads_per_multiprocessor},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, &Gpu::blocks_per_multiprocessor},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, &Gpu::registers_per_multiprocessor},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, &Gpu::shared_bytes_per_block},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &Gpu::shared_bytes_per_block_optin},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, &Gpu::shared_bytes_per_multiprocessor},
    {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, &Gpu::reserved_shared_bytes_per_block},
    {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, &Gpu::l2_bytes},
    {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, &Gpu::clock_khz},
    {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, &Gpu::memory_clock_khz},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, &Gpu::memory_bus_bits},
};

}  // namespace

namespace oomdiag {

int gpu_attribute(const Device& device, CUdevice_attribute attribute) {
  const Gpu& gpu = device.gpu;
  switch (static_cast<int>(attribute)) {
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
      return is_integrated(gpu);
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      return device.index + 1;
    case CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO:
      return double_ratio(gpu);
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED:
      return gpu.compute_major >= 9;
  }
  const auto* const known = std::ranges::find(kCommonAttributes, attribute, &KnownAttribute::attribute);
  if (known != std::end(kCommonAttributes)) return known->value;
  const auto* const of_gpu = std::ranges::find(kGpuAttributes, attribute, &GpuAttribute::attribute);
  return of_gpu != std::end(kGpuAttributes) ? gpu.*of_gpu->field : 0;
}

}  // namespace oomdiag

OOMDIAG_ENTRY_POINT CUresult cuDeviceGetCount(int* count) {
  *count = oomdiag::count_devices();
  return oomdiag::check_initialized();
}

OOMDIAG_ENTRY_POINT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (const CUresult error = oomdiag::check_initialized()) return error;
  *device = ordinal;
  return find_device(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

OOMDIAG_ENTRY_POINT CUresult cuDeviceGetName(char* name, int length, CUdevice ordinal) {
  const Device* device = find_device(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(name, static_cast<size_t>(length), "%s", device->gpu.name.c_str());
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice ordinal) {
  const Device* device = find_device(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  oomdiag::write_uuid(uuid->bytes, device->index);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuDeviceGetPCIBusId(char* text, int length, CUdevice ordinal) {
  const Device* device = find_device(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(text, static_cast<size_t>(length), "0000:%02X:00.0", static_cast<unsigned>(device->index + 1));
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuDeviceGetByPCIBusId(CUdevice* device, const char* text) {
  unsigned domain = 0;
  unsigned bus = 0;
  if (std::sscanf(text, "%x:%x", &domain, &bus) != 2) return CUDA_ERROR_INVALID_VALUE;
  const Device* found = oomdiag::find_installed(static_cast<int>(bus) - 1);
  if (!found || found->ordinal < 0) return CUDA_ERROR_INVALID_DEVICE;
  *device = found->ordinal;
  return CUDA_SUCCESS;
}

/// GPUs of one kind reach each other, others do not, and GeForce GPUs never: what a machine really allows depends on its
/// board and its links.
OOMDIAG_ENTRY_POINT CUresult cuDeviceCanAccessPeer(int* can, CUdevice ordinal, CUdevice peer_ordinal) {
  const Device* device = find_device(ordinal);
  const Device* peer = find_device(peer_ordinal);
  if (!device || !peer) return CUDA_ERROR_INVALID_DEVICE;
  *can = device != peer && device->gpu.name == peer->gpu.name && has_peers(device->gpu);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attribute, CUdevice device,
                                                     CUdevice peer) {
  if (const CUresult error = cuDeviceCanAccessPeer(value, device, peer)) return error;
  if (attribute == CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK) *value = 0;
  if (attribute == CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED) *value = 0;
  return CUDA_SUCCESS;
}

bool oomdiag_device_is_linked(int ordinal) {
  const Device* device = find_device(ordinal);
  return device && is_linked(device->gpu);
}

bool oomdiag_device_has_peers(int ordinal) {
  const Device* device = find_device(ordinal);
  return device && has_peers(device->gpu);
}

int oomdiag_device_driver_branch() { return oomdiag::machine_driver().branch; }

int oomdiag_device_architecture(int ordinal) {
  const Device* device = find_device(ordinal);
  return device ? device->architecture : 0;
}

const char* oomdiag_device_cudnn_description(int ordinal) {
  const Device* device = find_device(ordinal);
  return device ? device->cudnn_description.c_str() : nullptr;
}

bool oomdiag_device_describe(int index, oomdiag_gpu* gpu) {
  oomdiag::read_machine();  // that no GPU is visible to CUDA does not hide it here
  const Device* device = oomdiag::find_installed(index);
  if (!device) return false;
  *gpu = {.name = device->gpu.name.c_str(),
          .total_bytes = device->gpu.total_bytes,
          .used_bytes = oomdiag::count_used_bytes(*device),
          .compute_major = device->gpu.compute_major,
          .compute_minor = device->gpu.compute_minor,
          .clock_khz = device->gpu.clock_khz,
          .is_linked = is_linked(device->gpu),
          .has_peers = has_peers(device->gpu)};
  return true;
}

int oomdiag_device_processes(int index, int* pids, int64_t* bytes, int capacity) {
  const Device* device = oomdiag::find_installed(index);
  if (!device) return 0;
  auto processes = oomdiag::list_others(index);
  unsigned pid = 0;
  int64_t held = 0;
  const char* name = nullptr;
  for (unsigned i = 0; oomdiag_device_simulated_process(index, i, &pid, &held, &name); ++i) {
    processes.push_back({.pid = static_cast<pid_t>(pid), .bytes = held});
  }
  if (oomdiag::holds_context(*device))
    processes.insert(processes.begin(), {.pid = getpid(), .bytes = device->held_bytes});
  const int count = static_cast<int>(processes.size());
  for (int i = 0; i < std::min(count, capacity); ++i) {
    pids[i] = processes[static_cast<size_t>(i)].pid;
    bytes[i] = processes[static_cast<size_t>(i)].bytes;
  }
  return count;
}

int64_t oomdiag_device_context_bytes(int ordinal) {
  const Device* device = find_device(ordinal);
  return device ? device->gpu.context_bytes + device->gpu.first_kernel_bytes : 0;
}
