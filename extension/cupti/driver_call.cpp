#include "extension/cupti/driver_call.h"

#include <array>

#include "profiler/event.h"

namespace oomdiag {
namespace {

constexpr std::array<CUpti_CallbackId, 24> kMemoryCalls = {
    CUPTI_DRIVER_TRACE_CBID_cuMemAlloc_v2,
    CUPTI_DRIVER_TRACE_CBID_cuMemAllocPitch_v2,
    CUPTI_DRIVER_TRACE_CBID_cuMemAllocManaged,
    CUPTI_DRIVER_TRACE_CBID_cuMemFree_v2,
    CUPTI_DRIVER_TRACE_CBID_cuMemHostAlloc,
    CUPTI_DRIVER_TRACE_CBID_cuMemHostAlloc_v2,
    CUPTI_DRIVER_TRACE_CBID_cuMemAllocHost_v2,
    CUPTI_DRIVER_TRACE_CBID_cuMemFreeHost,
    CUPTI_DRIVER_TRACE_CBID_cuMemHostRegister_v2,
    CUPTI_DRIVER_TRACE_CBID_cuMemHostUnregister,
    CUPTI_DRIVER_TRACE_CBID_cuArrayCreate_v2,
    CUPTI_DRIVER_TRACE_CBID_cuArray3DCreate_v2,
    CUPTI_DRIVER_TRACE_CBID_cuArrayDestroy,
    CUPTI_DRIVER_TRACE_CBID_cuMemCreate,
    CUPTI_DRIVER_TRACE_CBID_cuMemRelease,
    CUPTI_DRIVER_TRACE_CBID_cuMemRetainAllocationHandle,
    CUPTI_DRIVER_TRACE_CBID_cuMemMap,
    CUPTI_DRIVER_TRACE_CBID_cuMemUnmap,
    CUPTI_DRIVER_TRACE_CBID_cuMemAllocAsync,
    CUPTI_DRIVER_TRACE_CBID_cuMemAllocAsync_ptsz,
    CUPTI_DRIVER_TRACE_CBID_cuMemAllocFromPoolAsync,
    CUPTI_DRIVER_TRACE_CBID_cuMemAllocFromPoolAsync_ptsz,
    CUPTI_DRIVER_TRACE_CBID_cuMemFreeAsync,
    CUPTI_DRIVER_TRACE_CBID_cuMemFreeAsync_ptsz,
};

int bytes_of(CUarray_format format) {
  switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
      return 1;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
      return 4;
    default:
      return 2;  // 16-bit integers and half; of the compressed and video formats an estimate
  }
}

uint64_t number_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }
uint64_t number_of(unsigned long long number) { return number; }  // CUdeviceptr and handles of pages

int64_t or_one(size_t count) { return count == 0 ? 1 : static_cast<int64_t>(count); }

/// One side of one call while it is read.
struct Reader {
  const CUpti_CallbackData& data;

  template <typename Params>
  const Params& params() const {
    return *static_cast<const Params*>(data.functionParams);
  }
  bool enters() const { return data.callbackSite == CUPTI_API_ENTER; }
  CUresult result() const { return *static_cast<const CUresult*>(data.functionReturnValue); }

  /// `place` is where the driver wrote the result.
  template <typename Pointer>
  DriverCall allocated(DriverMemory memory, const Pointer* place, int64_t bytes) const {
    if (enters()) return {};
    if (result() == CUDA_ERROR_OUT_OF_MEMORY) {
      return {.action = DriverAction::allocate, .memory = memory, .out_of_memory = true, .bytes = bytes};
    }
    if (result() != CUDA_SUCCESS || place == nullptr || *place == Pointer{}) return {};
    return {.action = DriverAction::allocate, .memory = memory, .address = number_of(*place), .bytes = bytes};
  }
  template <typename Pointer>
  DriverCall released(DriverMemory memory, Pointer pointer) const {
    if (!enters() || pointer == Pointer{}) return {};
    return {.action = DriverAction::release, .memory = memory, .address = number_of(pointer)};
  }

  template <typename Params>
  DriverCall plain() const {
    return allocated(DriverMemory::device, params<Params>().dptr, static_cast<int64_t>(params<Params>().bytesize));
  }
  template <typename Params>
  DriverCall pitched() const {
    const auto& p = params<Params>();
    const bool known = !enters() && result() == CUDA_SUCCESS && p.pPitch != nullptr;
    const size_t pitch = known ? *p.pPitch : p.WidthInBytes;
    return allocated(DriverMemory::device, p.dptr, static_cast<int64_t>(pitch * p.Height));
  }
  template <typename Params>
  DriverCall pinned() const {
    return allocated(DriverMemory::pinned, params<Params>().pp, static_cast<int64_t>(params<Params>().bytesize));
  }
  template <typename Params>
  DriverCall registered() const {
    const auto& p = params<Params>();
    return allocated(DriverMemory::pinned, &p.p, static_cast<int64_t>(p.bytesize));
  }
  template <typename Params>
  DriverCall pooled() const {
    return allocated(DriverMemory::pool, params<Params>().dptr, static_cast<int64_t>(params<Params>().bytesize));
  }
  DriverCall array() const {
    const auto& p = params<cuArrayCreate_v2_params>();
    const auto& a = *p.pAllocateArray;
    return allocated(DriverMemory::array, p.pHandle,
                     or_one(a.Width) * or_one(a.Height) * bytes_of(a.Format) * or_one(a.NumChannels));
  }
  DriverCall array_3d() const {
    const auto& p = params<cuArray3DCreate_v2_params>();
    const auto& a = *p.pAllocateArray;
    return allocated(DriverMemory::array, p.pHandle,
                     or_one(a.Width) * or_one(a.Height) * or_one(a.Depth) * bytes_of(a.Format) * or_one(a.NumChannels));
  }
  DriverCall created() const {
    const auto& p = params<cuMemCreate_params>();
    if (p.prop == nullptr || p.prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return {};  // pages of the host
    DriverCall call = allocated(DriverMemory::handle, p.handle, static_cast<int64_t>(p.size));
    call.device = p.prop->location.id;
    return call;
  }
  DriverCall mapped() const {
    const auto& p = params<cuMemMap_params>();
    if (enters() || result() != CUDA_SUCCESS) return {};
    return {.action = DriverAction::map,
            .memory = DriverMemory::handle,
            .address = p.handle,
            .mapped = p.ptr,
            .bytes = static_cast<int64_t>(p.size)};
  }
  DriverCall unmapped() const {
    const auto& p = params<cuMemUnmap_params>();
    if (!enters()) return {};
    return {.action = DriverAction::unmap,
            .memory = DriverMemory::handle,
            .mapped = p.ptr,
            .bytes = static_cast<int64_t>(p.size)};
  }
  DriverCall retained() const {
    const auto& p = params<cuMemRetainAllocationHandle_params>();
    if (enters() || result() != CUDA_SUCCESS || p.handle == nullptr) return {};
    return {.action = DriverAction::retain, .memory = DriverMemory::handle, .address = *p.handle};
  }
};

}  // namespace

std::span<const CUpti_CallbackId> memory_calls() { return kMemoryCalls; }

DriverCall read_call(CUpti_CallbackId id, const CUpti_CallbackData& data) noexcept {
  const Reader read{data};
  if (data.functionParams == nullptr || (!read.enters() && data.functionReturnValue == nullptr)) return {};
  switch (id) {
    case CUPTI_DRIVER_TRACE_CBID_cuMemAlloc_v2:
      return read.plain<cuMemAlloc_v2_params>();
    case CUPTI_DRIVER_TRACE_CBID_cuMemAllocPitch_v2:
      return read.pitched<cuMemAllocPitch_v2_params>();
    case CUPTI_DRIVER_TRACE_CBID_cuMemAllocManaged:
      return read.allocated(DriverMemory::managed, read.params<cuMemAllocManaged_params>().dptr,
                            static_cast<int64_t>(read.params<cuMemAllocManaged_params>().bytesize));
    case CUPTI_DRIVER_TRACE_CBID_cuMemFree_v2:
      return read.released(DriverMemory::device, read.params<cuMemFree_v2_params>().dptr);
    case CUPTI_DRIVER_TRACE_CBID_cuMemHostAlloc:
    case CUPTI_DRIVER_TRACE_CBID_cuMemHostAlloc_v2:  // the same prototype: the header has one structure for both
      return read.pinned<cuMemHostAlloc_params>();
    case CUPTI_DRIVER_TRACE_CBID_cuMemAllocHost_v2:
      return read.pinned<cuMemAllocHost_v2_params>();
    case CUPTI_DRIVER_TRACE_CBID_cuMemFreeHost:
      return read.released(DriverMemory::pinned, read.params<cuMemFreeHost_params>().p);
    case CUPTI_DRIVER_TRACE_CBID_cuMemHostRegister_v2:
      return read.registered<cuMemHostRegister_v2_params>();
    case CUPTI_DRIVER_TRACE_CBID_cuMemHostUnregister:
      return read.released(DriverMemory::pinned, read.params<cuMemHostUnregister_params>().p);
    case CUPTI_DRIVER_TRACE_CBID_cuArrayCreate_v2:
      return read.array();
    case CUPTI_DRIVER_TRACE_CBID_cuArray3DCreate_v2:
      return read.array_3d();
    case CUPTI_DRIVER_TRACE_CBID_cuArrayDestroy:
      return read.released(DriverMemory::array, read.params<cuArrayDestroy_params>().hArray);
    case CUPTI_DRIVER_TRACE_CBID_cuMemCreate:
      return read.created();
    case CUPTI_DRIVER_TRACE_CBID_cuMemRelease:
      return read.released(DriverMemory::handle, read.params<cuMemRelease_params>().handle);
    case CUPTI_DRIVER_TRACE_CBID_cuMemRetainAllocationHandle:
      return read.retained();
    case CUPTI_DRIVER_TRACE_CBID_cuMemMap:
      return read.mapped();
    case CUPTI_DRIVER_TRACE_CBID_cuMemUnmap:
      return read.unmapped();
    case CUPTI_DRIVER_TRACE_CBID_cuMemAllocAsync:
      return read.pooled<cuMemAllocAsync_params>();
    case CUPTI_DRIVER_TRACE_CBID_cuMemAllocAsync_ptsz:
      return read.pooled<cuMemAllocAsync_ptsz_params>();
    case CUPTI_DRIVER_TRACE_CBID_cuMemAllocFromPoolAsync:
      return read.pooled<cuMemAllocFromPoolAsync_params>();
    case CUPTI_DRIVER_TRACE_CBID_cuMemAllocFromPoolAsync_ptsz:
      return read.pooled<cuMemAllocFromPoolAsync_ptsz_params>();
    case CUPTI_DRIVER_TRACE_CBID_cuMemFreeAsync:
      return read.released(DriverMemory::pool, read.params<cuMemFreeAsync_params>().dptr);
    case CUPTI_DRIVER_TRACE_CBID_cuMemFreeAsync_ptsz:
      return read.released(DriverMemory::pool, read.params<cuMemFreeAsync_ptsz_params>().dptr);
    default:
      return {};
  }
}

}  // namespace oomdiag
