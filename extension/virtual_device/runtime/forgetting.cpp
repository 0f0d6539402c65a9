#include "extension/virtual_device/runtime/forgetting.h"

#include <dlfcn.h>

#include <atomic>
#include <string>

#include "extension/environment.h"
#include "extension/virtual_device/driver/device.h"

namespace oomdiag {
namespace {

std::atomic<bool> is_loaded = false;
std::atomic<bool> is_waiting = false;
int (*poll)() = nullptr;

/// The one that the launcher names, for the torch of this program; else that of the build, beside this library.
std::string contents_library() {
  if (const char* named = variables::text(variables::kContents); *named) return named;
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(load_forgetting), &info);
  const std::string own = info.dli_fname ? info.dli_fname : "";
  return own.substr(0, own.rfind('/') + 1) + "liboomdiag_forget.so";
}

}  // namespace

void load_forgetting() noexcept try {
  if (is_loaded.load(std::memory_order_relaxed)) return;
  void* torch = dlopen("libc10_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  if (!torch) return;  // not a torch program, or not yet
  dlclose(torch);
  if (is_loaded.exchange(true)) return;
  void* library = dlopen(contents_library().c_str(), RTLD_NOW);
  if (library) poll = reinterpret_cast<int (*)()>(dlsym(library, "oomdiag_forget_poll"));
  if (!poll) return oomdiag_device_keep_no_contents();
  is_waiting.store(true, std::memory_order_release);
} catch (...) {
  oomdiag_device_keep_no_contents();
}

void poll_forgetting() noexcept {
  if (!is_waiting.load(std::memory_order_acquire)) [[likely]]
    return;
  const int answer = poll();
  if (answer != 0 && is_waiting.exchange(false) && answer < 0) oomdiag_device_keep_no_contents();
}

}  // namespace oomdiag
