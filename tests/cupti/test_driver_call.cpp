#include <algorithm>

#include "extension/cupti/driver_call.h"
#include "tests/catch.h"

using namespace oomdiag;

namespace {

/// Both sides of a call with these parameters, as CUPTI gives them.
template <typename Params>
struct Call {
  Params params;
  CUresult result = CUDA_SUCCESS;

  DriverCall read(CUpti_CallbackId id, CUpti_ApiCallbackSite site) {
    CUpti_CallbackData data{};
    data.callbackSite = site;
    data.functionParams = &params;
    data.functionReturnValue = site == CUPTI_API_EXIT ? &result : nullptr;
    return read_call(id, data);
  }
};

}  // namespace

TEST_CASE("an allocation is read after the call, with the address that the driver wrote", "[cupti]") {
  CUdeviceptr address = 0x7f0000000000;
  Call<cuMemAlloc_v2_params> call{{&address, 4096}};
  CHECK(call.read(CUPTI_DRIVER_TRACE_CBID_cuMemAlloc_v2, CUPTI_API_ENTER).action == DriverAction::none);
  CHECK(call.read(CUPTI_DRIVER_TRACE_CBID_cuMemAlloc_v2, CUPTI_API_EXIT) ==
        DriverCall{.action = DriverAction::allocate, .address = 0x7f0000000000, .bytes = 4096});
}

TEST_CASE("an allocation that failed for lack of memory is distinguished from one that failed otherwise", "[cupti]") {
  CUdeviceptr address = 0;
  Call<cuMemAlloc_v2_params> call{{&address, 4096}, CUDA_ERROR_OUT_OF_MEMORY};
  CHECK(call.read(CUPTI_DRIVER_TRACE_CBID_cuMemAlloc_v2, CUPTI_API_EXIT).out_of_memory);
  call.result = CUDA_ERROR_INVALID_CONTEXT;
  CHECK(call.read(CUPTI_DRIVER_TRACE_CBID_cuMemAlloc_v2, CUPTI_API_EXIT).action == DriverAction::none);
}

TEST_CASE("a free is read before the call, and a free of null is nothing", "[cupti]") {
  Call<cuMemFree_v2_params> call{{0x1000}};
  CHECK(call.read(CUPTI_DRIVER_TRACE_CBID_cuMemFree_v2, CUPTI_API_ENTER).action == DriverAction::release);
  CHECK(call.read(CUPTI_DRIVER_TRACE_CBID_cuMemFree_v2, CUPTI_API_EXIT).action == DriverAction::none);
  call.params.dptr = 0;
  CHECK(call.read(CUPTI_DRIVER_TRACE_CBID_cuMemFree_v2, CUPTI_API_ENTER).action == DriverAction::none);
}

TEST_CASE("a pitched allocation takes what its rows take", "[cupti]") {
  CUdeviceptr address = 0x1000;
  size_t pitch = 512;
  Call<cuMemAllocPitch_v2_params> call{{&address, &pitch, 300, 10, 4}};
  CHECK(call.read(CUPTI_DRIVER_TRACE_CBID_cuMemAllocPitch_v2, CUPTI_API_EXIT).bytes == 5120);
}

TEST_CASE("pages say their device; those of the host are not the GPU's", "[cupti]") {
  CUmemGenericAllocationHandle handle = 5;
  CUmemAllocationProp properties{};
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = 2;
  Call<cuMemCreate_params> call{{&handle, 2 << 20, &properties, 0}};
  CHECK(call.read(CUPTI_DRIVER_TRACE_CBID_cuMemCreate, CUPTI_API_EXIT) == DriverCall{.action = DriverAction::allocate,
                                                                                     .memory = DriverMemory::handle,
                                                                                     .device = 2,
                                                                                     .address = 5,
                                                                                     .bytes = 2 << 20});
  properties.location.type = CU_MEM_LOCATION_TYPE_HOST;
  CHECK(call.read(CUPTI_DRIVER_TRACE_CBID_cuMemCreate, CUPTI_API_EXIT).action == DriverAction::none);
}

TEST_CASE("mapping follows the call, unmapping precedes it", "[cupti]") {
  Call<cuMemMap_params> map{{0x200000, 2 << 20, 0, 5, 0}};
  CHECK(map.read(CUPTI_DRIVER_TRACE_CBID_cuMemMap, CUPTI_API_EXIT).action == DriverAction::map);
  CHECK(map.read(CUPTI_DRIVER_TRACE_CBID_cuMemMap, CUPTI_API_ENTER).action == DriverAction::none);
  Call<cuMemUnmap_params> unmap{{0x200000, 2 << 20}};
  CHECK(unmap.read(CUPTI_DRIVER_TRACE_CBID_cuMemUnmap, CUPTI_API_ENTER).mapped == 0x200000);
}

TEST_CASE("an array takes its elements, a one-dimensional one too", "[cupti]") {
  CUarray array = reinterpret_cast<CUarray>(0x10);
  CUDA_ARRAY_DESCRIPTOR shape{.Width = 100, .Height = 0, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 2};
  Call<cuArrayCreate_v2_params> call{{&array, &shape}};
  const DriverCall read = call.read(CUPTI_DRIVER_TRACE_CBID_cuArrayCreate_v2, CUPTI_API_EXIT);
  CHECK(read.bytes == 800);
  CHECK(read.memory == DriverMemory::array);
}

TEST_CASE("no launch, no copy and no whole domain is watched", "[cupti]") {
  const auto calls = memory_calls();
  for (const CUpti_CallbackId id : {CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel, CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx,
                                    CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoD_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoH_v2}) {
    CHECK(std::find(calls.begin(), calls.end(), id) == calls.end());
  }
  CHECK(calls.size() < 32);
}

TEST_CASE("a call that is not one of memory says nothing", "[cupti]") {
  Call<cuMemFree_v2_params> call{{0x1000}};
  CHECK(call.read(CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel, CUPTI_API_ENTER).action == DriverAction::none);
}
