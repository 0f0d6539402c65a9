// Who opens libcudnn.so.9 by its name and asks that handle for functions (cudnn_frontend's dynamic loading, XLA) would pass
// this library over: a handle looks in its own library and in what that needs, in that order (dlsym(3)), and never in what was
// preloaded. So dlopen is interposed for that one name: what is opened is a library that has nothing and needs two, this
// one first and the real one then. All other names go on with a jump, so that the C library sees who called;
// of those one is a sign (cuda_python.h).

#include <dlfcn.h>

#include <cstring>
#include <string_view>

#include "extension/virtual_device/dnn/cuda_python.h"
#include "extension/virtual_device/dnn/real.h"
#include "extension/virtual_device/entry_point.h"

namespace {

using Open = void* (*)(const char* file, int mode) noexcept;

Open real_open() {
  static const auto real = reinterpret_cast<Open>(dlsym(RTLD_NEXT, "dlopen"));
  return real;
}

bool is_cudnn(const char* file) {
  const char* slash = std::strrchr(file, '/');
  const std::string_view name = slash ? slash + 1 : file;
  return name == "libcudnn.so.9" || name == "libcudnn.so";
}

/// Null unless the real one is there: where a plain name is looked for depends on who calls, so that it is not loaded here.
void* open_both(const char* file, int mode) {
  if (!real_open()(file, std::strchr(file, '/') ? mode : mode | RTLD_NOLOAD)) return nullptr;
  return real_open()("liboomdiag_cudnn_by_name.so", RTLD_NOW);
}

}  // namespace

void* oomdiag::find_real_library() { return real_open()("libcudnn.so.9", RTLD_NOW | RTLD_NOLOAD); }

#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
OOMDIAG_ENTRY_POINT void* dlopen(const char* file, int mode) noexcept {
  if (file && is_cudnn(file)) {
    if (void* both = open_both(file, mode)) return both;
  }
  if (file && oomdiag::is_cuda_python_runtime(file)) oomdiag::redirect_cuda_python();
  return real_open()(file, mode);
}
#endif
