#include "extension/cupti/calling_libraries.h"

#include <dlfcn.h>
#include <link.h>
#include <unwind.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string_view>

// _dl_find_object (glibc 2.35) maps an address to its object without a lock, and the unwinder of g++ 12 and later uses it
// too: inside cudaMalloc, under the caching allocator's lock, nothing here can wait for a thread that loads a library. An
// older glibc has only dladdr1, which takes the loader's lock, as its unwinder does.

namespace oomdiag {
namespace {

constexpr int kMaxFrames = 64;
constexpr size_t kMaxDescribed = 24;

struct NativeFrame {
  uintptr_t address = 0;
  const link_map* object = nullptr;
};

/// The shared object that has this address, null if none has.
const link_map* find_object(uintptr_t address) {
#if __GLIBC_PREREQ(2, 35)
  dl_find_object found{};
  return _dl_find_object(reinterpret_cast<void*>(address), &found) == 0 ? found.dlfo_link_map : nullptr;
#else
  Dl_info symbol{};
  void* object = nullptr;
  const bool is_known = dladdr1(reinterpret_cast<void*>(address), &symbol, &object, RTLD_DL_LINKMAP) != 0;
  return is_known ? static_cast<const link_map*>(object) : nullptr;
#endif
}

/// Calls `visit(frame)` for the frames of this thread, innermost first, until it says true.
template <typename Visit>
void walk(Visit visit) {
  struct State {
    Visit& visit;
    int frames = 0;
  } state{visit};
  const auto step = [](_Unwind_Context* context, void* data) -> _Unwind_Reason_Code {
    auto& now = *static_cast<State*>(data);
    const auto address = static_cast<uintptr_t>(_Unwind_GetIP(context)) - 1;  // inside of the call, not behind it
    if (++now.frames > kMaxFrames) return _URC_END_OF_STACK;
    const link_map* const object = find_object(address);
    if (object == nullptr) return _URC_NO_REASON;
    return now.visit(NativeFrame{address, object}) ? _URC_END_OF_STACK : _URC_NO_REASON;
  };
  _Unwind_Backtrace(step, &state);
}

/// The loader knows the program itself by an empty name.
const char* file_name_of(const link_map* object) {
  const char* path = object->l_name;
  if (path == nullptr || *path == '\0') return program_invocation_short_name;
  const char* slash = std::strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

}  // namespace

bool is_cuda_layer(const char* file_name) noexcept {
  constexpr std::string_view kCudaLayers[] = {
      "libcuda.so", "libcudart.so", "libcudart-", "libcupti.so", "liboomdiag.so", "liboomdiag_preload.so",
      "libffi.so",  "libffi-",      "_ctypes.",   "libc.so"};
  const std::string_view name(file_name);
  return std::any_of(std::begin(kCudaLayers), std::end(kCudaLayers),
                     [&](std::string_view one) { return name.starts_with(one); });
}

uint16_t CallingLibraries::find() noexcept {
  size_t found = 0;
  walk([&](const NativeFrame& frame) {
    found = number_of(frame.object);
    return found != 0;
  });
  return static_cast<uint16_t>(found);
}

// The number of an object, 0 if it only passes requests on.
size_t CallingLibraries::number_of(const void* identity) noexcept {
  const size_t known = count_.load(std::memory_order_acquire);
  size_t number = look_up(identity, 1, known);
  if (number == 0) number = add(identity, known);
  return objects_[number].is_cuda_layer ? 0 : number;
}

size_t CallingLibraries::look_up(const void* identity, size_t from, size_t to) const noexcept {
  for (size_t i = from; i < to; ++i) {
    if (objects_[i].identity.load(std::memory_order_relaxed) == identity) return i;
  }
  return 0;
}

// Another thread may have added it since there were `known`.
size_t CallingLibraries::add(const void* identity, size_t known) noexcept {
  const std::lock_guard lock(adding_);
  const size_t count = count_.load(std::memory_order_relaxed);
  if (const size_t number = look_up(identity, known, count); number != 0 || count == kMax) return number;
  Object& object = objects_[count];
  const char* name = file_name_of(static_cast<const link_map*>(identity));
  object.is_cuda_layer = is_cuda_layer(name);
  const bool is_mocked_cudnn = std::strcmp(name, "liboomdiag_cudnn.so") == 0;  // stands for cuDNN
  std::snprintf(object.name, sizeof object.name, "%s", is_mocked_cudnn ? "libcudnn.so.9" : name);
  object.identity.store(identity, std::memory_order_relaxed);
  count_.store(count + 1, std::memory_order_release);
  return count;
}

const char* CallingLibraries::name(uint16_t number) const noexcept {
  return number < count_.load(std::memory_order_acquire) ? objects_[number].name : "";
}

std::string describe_stack() {
  std::string text;
  size_t frames = 0;
  walk([&](const NativeFrame& frame) {
    const char* object = file_name_of(frame.object);
    if (frames == 0 && is_cuda_layer(object)) return false;
    Dl_info symbol{};
    const bool named = dladdr(reinterpret_cast<void*>(frame.address), &symbol) != 0 && symbol.dli_sname != nullptr;
    char line[256];
    const uintptr_t base = named ? reinterpret_cast<uintptr_t>(symbol.dli_saddr) : frame.object->l_addr;
    std::snprintf(line, sizeof line, "%s%.120s+0x%zx (%.80s)", frames == 0 ? "" : " < ", named ? symbol.dli_sname : "",
                  static_cast<size_t>(frame.address - base), object);
    text += line;
    return ++frames == kMaxDescribed;
  });
  return text;
}

}  // namespace oomdiag
