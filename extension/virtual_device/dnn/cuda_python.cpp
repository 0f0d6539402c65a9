// cuda-python (cuda.bindings.runtime, which torch.cuda.memory._use_uvm() calls) has a static CUDA runtime inside, and a static
// runtime does not start on the virtual driver (driver/api_lookup.cpp, cuGetExportTable). But its Python functions reach that
// runtime through a table: cuda.bindings.cyruntime offers its C functions to other modules as Cython documents it, one capsule
// for each in __pyx_capi__, and cuda.bindings.runtime takes them from there when it is imported. So, right before that import,
// each capsule gets the virtual runtime's function of the same name and types. Here and not in runtime/, because dlopen is
// interposed in this library (open.cpp).

#include "extension/virtual_device/dnn/cuda_python.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "extension/python_symbols.h"

namespace {

using Object = void;  // PyObject

/// CPython's functions, of the stable ABI; a process without Python has none.
template <typename Function>
Function python(const char* name) {
  Function function = nullptr;
  oomdiag::python_symbols::find(function, name);
  return function;
}

Object* import(const char* module) { return python<Object* (*)(const char*)>("PyImport_ImportModule")(module); }

Object* attribute(Object* object, const char* name) {
  return object ? python<Object* (*)(Object*, const char*)>("PyObject_GetAttrString")(object, name) : nullptr;
}

const char* text(Object* object) {
  return object ? python<const char* (*)(Object*, long*)>("PyUnicode_AsUTF8AndSize")(object, nullptr) : nullptr;
}

/// The virtual runtime of the major version that cuda-python is for.
void* find_runtime() {
  const char* version = text(attribute(import("cuda.bindings"), "__version__"));
  const std::string name = "libcudart.so." + std::to_string(version ? std::atoi(version) : 0);
  return dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
}

void redirect(Object* table, void* runtime) {
  const auto next = python<int (*)(Object*, long*, Object**, Object**)>("PyDict_Next");
  const auto set = python<int (*)(Object*, void*)>("PyCapsule_SetPointer");
  Object* name = nullptr;
  Object* capsule = nullptr;
  for (long place = 0; next(table, &place, &name, &capsule) != 0;) {
    const char* function = text(name);
    if (void* own = function ? dlsym(runtime, function) : nullptr) set(capsule, own);
  }
}

}  // namespace

bool oomdiag::is_cuda_python_runtime(const char* file) noexcept {
  return std::strstr(file, "/cuda/bindings/runtime.") != nullptr;
}

// The modules stay imported, so that no reference is given back.
void oomdiag::redirect_cuda_python() noexcept try {
  const auto holds_gil = python<int (*)()>("PyGILState_Check");
  if (!holds_gil || holds_gil() == 0) return;
  Object* table = attribute(import("cuda.bindings.cyruntime"), "__pyx_capi__");
  void* runtime = table ? find_runtime() : nullptr;
  if (runtime) redirect(table, runtime);
  python<void (*)()>("PyErr_Clear")();
} catch (...) {
}
