// Preloaded into any program. When CUDA is first asked for, loads the recorder into the process; does nothing in programs
// that have no torch. No Torch dependency: libtorch is not on the loader's path of a wheel, so a preloaded library that needs
// it would fail at exec.
//
// It defines two functions of the runtime, under the runtime's own version node, and passes both on:
//   cudaGetDeviceCount   called before the caching allocator is initialised: the moment to load the recorder
//   cudaGetDevice        called before every allocation: the recorder attaches itself to the allocator at the first call
//                        after its initialisation. In a C++ program the first allocation comes before any op that a
//                        recorder could see; polling in ops would miss it.
//
// Each is there once for each major version of CUDA. The real functions are found by the library's name, never by RTLD_NEXT: Python loads libtorch, and with it the runtime,
// into a scope of its own.

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "extension/cuda_major.h"
#include "extension/cupti/interpose.h"
#include "extension/environment.h"
#include "extension/nvtx.h"
#include "extension/python_build.h"
#include "extension/record/control.h"
#include "extension/torch_version.h"
#include "extension/write_status.h"

namespace {

using GetDevice = int (*)(int*);

// A failed lookup is not kept: the runtime may be loaded later.
GetDevice find_real(std::atomic<GetDevice>& known, const char* runtime_name, const char* name) {
  if (const GetDevice found = known.load(std::memory_order_relaxed); found != nullptr) return found;
  void* runtime = dlopen(runtime_name, RTLD_NOW | RTLD_NOLOAD);
  if (runtime == nullptr) return nullptr;
  const auto found = reinterpret_cast<GetDevice>(dlsym(runtime, name));
  known.store(found, std::memory_order_relaxed);
  return found;
}

std::atomic<bool> load_begun = false;
std::atomic<bool> polling = false;
const oomdiag::RecorderFunctions* recorder = nullptr;  // set before `polling`

// Another minor version of torch has other virtual tables: recording would crash it.
bool fits_torch() {
  const std::string version = oomdiag::loaded_torch_version();
  const std::string recorders = oomdiag::variables::text(oomdiag::variables::kRecorderFor);
  if (version.empty()) {
    oomdiag::report_not_recording("no file in '" + oomdiag::loaded_torch_folder() +
                                  "' says which torch this is, and the recorder was built for torch " + recorders);
    return false;
  }
  if (!recorders.empty() && oomdiag::minor_version(version) == oomdiag::minor_version(recorders)) return true;
  oomdiag::report_not_recording("the program has torch " + version + ", and the recorder was built for torch " +
                                recorders +
                                "; name the program's own python: oomdiag run -- /path/to/bin/python train.py");
  return false;
}

// The recorder that the program brought itself, where it did, else ours. Loaded for itself alone: no library of the program
// shall find another BLAS or protobuf than without us.
const oomdiag::RecorderFunctions* find_recorder(const char* path) {
  void* library = dlopen(oomdiag::kRecorderLibrary, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) oomdiag::report_not_recording(dlerror());
  return library == nullptr
             ? nullptr
             : static_cast<const oomdiag::RecorderFunctions*>(dlsym(library, oomdiag::kRecorderFunctions));
}

void load_recorder() {
  const char* path = oomdiag::variables::text(oomdiag::variables::kRecorder);
  void* torch = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (torch == nullptr) return;  // not a torch program, or not yet
  dlclose(torch);
  if (load_begun.exchange(true)) return;  // also when loading asks for the device count again
  if (const char* why = oomdiag::variables::text(oomdiag::variables::kNoRecorder); *why != '\0')
    return oomdiag::report_not_recording(why);
  if (*path == '\0') return;
  if (!fits_torch()) return;
  if (oomdiag::python_is_free_threaded()) return oomdiag::report_not_recording(oomdiag::kFreeThreaded);
  recorder = find_recorder(path);
  if (recorder == nullptr) return;
  oomdiag::route_cupti(recorder->cupti());
  recorder->loaded();
  oomdiag::write_status(oomdiag::kRecorderLoaded);
  oomdiag::record_nvtx_ranges(recorder->range);
  polling.store(true, std::memory_order_release);
}

// Reports to the launcher that preloading worked in this process, whatever comes of it.
__attribute__((constructor)) void report_loaded() { oomdiag::write_status(""); }

template <typename Major>
int count_devices(GetDevice own, int* count) {
  if (!load_begun.load(std::memory_order_relaxed)) load_recorder();
  static std::atomic<GetDevice> known = nullptr;
  const GetDevice get = find_real(known, Major::kRuntime, "cudaGetDeviceCount");
  return get == nullptr || get == own ? oomdiag::kErrorInsufficientDriver : get(count);
}

template <typename Major>
int find_device(GetDevice own, int* device) {
  if (polling.load(std::memory_order_acquire) && recorder->poll() != 0) polling.store(false);
  static std::atomic<GetDevice> known = nullptr;
  const GetDevice get = find_real(known, Major::kRuntime, "cudaGetDevice");
  return get == nullptr || get == own ? oomdiag::kErrorInsufficientDriver : get(device);
}

}  // namespace

#define OOMDIAG_INTERPOSED extern "C" __attribute__((visibility("default"))) int

OOMDIAG_INTERPOSED cudaGetDeviceCount(int* count) { return count_devices<oomdiag::Cuda13>(cudaGetDeviceCount, count); }
OOMDIAG_INTERPOSED cudaGetDevice(int* device) { return find_device<oomdiag::Cuda13>(cudaGetDevice, device); }

OOMDIAG_INTERPOSED oomdiag_count_12(int* count) { return count_devices<oomdiag::Cuda12>(oomdiag_count_12, count); }
OOMDIAG_INTERPOSED oomdiag_device_12(int* device) { return find_device<oomdiag::Cuda12>(oomdiag_device_12, device); }
OOMDIAG_OF_CUDA_12(oomdiag_count_12, "cudaGetDeviceCount", "libcudart");
OOMDIAG_OF_CUDA_12(oomdiag_device_12, "cudaGetDevice", "libcudart");

/// AddressSanitizer's runtime takes options from a function of this name before the environment's, and ends a program that preloads any
/// other library before it. We define no allocator and none of what it intercepts, so the order does no harm. A program that
/// defines the function itself is asked instead of us: for it OOMDIAG_PRELOAD_FIRST names the runtime.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options();
const char* __asan_default_options() { return "verify_asan_link_order=0"; }
