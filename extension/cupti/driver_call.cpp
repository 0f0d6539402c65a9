#include "extension/cupti/driver_call.h"

#include <algorithm>
#include <iterator>

#include "profiler/event.h"

namespace oomdiag {
namespace {

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

  /// Memory whose address is written to `place`, a member of the parameters; and memory that such a member is the address of.
  template <DriverMemory memory, auto place>
  DriverCall taken() const {
    const auto& p = params_of(place);
    return allocated(memory, p.*place, static_cast<int64_t>(p.bytesize));
  }
  template <DriverMemory memory, auto pointer>
  DriverCall given_back() const {
    return released(memory, params_of(pointer).*pointer);
  }
  template <typename Params, typename Member>
  const Params& params_of(Member Params::*) const {
    return params<Params>();
  }

  DriverCall pitched() const {
    const auto& p = params<cuMemAllocPitch_v2_params>();
    const bool known = !enters() && result() == CUDA_SUCCESS && p.pPitch != nullptr;
    const size_t pitch = known ? *p.pPitch : p.WidthInBytes;
    return allocated(DriverMemory::device, p.dptr, static_cast<int64_t>(pitch * p.Height));
  }
  DriverCall registered() const {
    const auto& p = params<cuMemHostRegister_v2_params>();
    return allocated(DriverMemory::pinned, &p.p, static_cast<int64_t>(p.bytesize));
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

/// The calls of the driver that take or give memory, and how each is read. Of cuMemHostAlloc and its second form, which has the same
/// prototype, the header has one structure.
struct MemoryCall {
  CUpti_CallbackId id;
  DriverCall (Reader::*read)() const;
};
#define OOMDIAG_CALL(name, ...) \
  { CUPTI_DRIVER_TRACE_CBID_##name, &Reader::__VA_ARGS__ }
constexpr MemoryCall kMemoryCalls[] = {
    OOMDIAG_CALL(cuMemAlloc_v2, taken<DriverMemory::device, &cuMemAlloc_v2_params::dptr>),
    OOMDIAG_CALL(cuMemAllocPitch_v2, pitched),
    OOMDIAG_CALL(cuMemAllocManaged, taken<DriverMemory::managed, &cuMemAllocManaged_params::dptr>),
    OOMDIAG_CALL(cuMemFree_v2, given_back<DriverMemory::device, &cuMemFree_v2_params::dptr>),
    OOMDIAG_CALL(cuMemHostAlloc, taken<DriverMemory::pinned, &cuMemHostAlloc_params::pp>),
    OOMDIAG_CALL(cuMemHostAlloc_v2, taken<DriverMemory::pinned, &cuMemHostAlloc_params::pp>),
    OOMDIAG_CALL(cuMemAllocHost_v2, taken<DriverMemory::pinned, &cuMemAllocHost_v2_params::pp>),
    OOMDIAG_CALL(cuMemFreeHost, given_back<DriverMemory::pinned, &cuMemFreeHost_params::p>),
    OOMDIAG_CALL(cuMemHostRegister_v2, registered),
    OOMDIAG_CALL(cuMemHostUnregister, given_back<DriverMemory::pinned, &cuMemHostUnregister_params::p>),
    OOMDIAG_CALL(cuArrayCreate_v2, array),
    OOMDIAG_CALL(cuArray3DCreate_v2, array_3d),
    OOMDIAG_CALL(cuArrayDestroy, given_back<DriverMemory::array, &cuArrayDestroy_params::hArray>),
    OOMDIAG_CALL(cuMemCreate, created),
    OOMDIAG_CALL(cuMemRelease, given_back<DriverMemory::handle, &cuMemRelease_params::handle>),
    OOMDIAG_CALL(cuMemRetainAllocationHandle, retained),
    OOMDIAG_CALL(cuMemMap, mapped),
    OOMDIAG_CALL(cuMemUnmap, unmapped),
    OOMDIAG_CALL(cuMemAllocAsync, taken<DriverMemory::pool, &cuMemAllocAsync_params::dptr>),
    OOMDIAG_CALL(cuMemAllocAsync_ptsz, taken<DriverMemory::pool, &cuMemAllocAsync_ptsz_params::dptr>),
    OOMDIAG_CALL(cuMemAllocFromPoolAsync, taken<DriverMemory::pool, &cuMemAllocFromPoolAsync_params::dptr>),
    OOMDIAG_CALL(cuMemAllocFromPoolAsync_ptsz, taken<DriverMemory::pool, &cuMemAllocFromPoolAsync_ptsz_params::dptr>),
    OOMDIAG_CALL(cuMemFreeAsync, given_back<DriverMemory::pool, &cuMemFreeAsync_params::dptr>),
    OOMDIAG_CALL(cuMemFreeAsync_ptsz, given_back<DriverMemory::pool, &cuMemFreeAsync_ptsz_params::dptr>),
};
#undef OOMDIAG_CALL

}  // namespace

std::vector<CUpti_CallbackId> memory_calls() {
  std::vector<CUpti_CallbackId> ids;
  for (const MemoryCall& call : kMemoryCalls) ids.push_back(call.id);
  return ids;
}

DriverCall read_call(CUpti_CallbackId id, const CUpti_CallbackData& data) noexcept {
  const Reader read{data};
  if (data.functionParams == nullptr || (!read.enters() && data.functionReturnValue == nullptr)) return {};
  const auto* const call = std::ranges::find(kMemoryCalls, id, &MemoryCall::id);
  return call == std::end(kMemoryCalls) ? DriverCall{} : (read.*call->read)();
}

}  // namespace oomdiag
