#pragma once

#include <dlfcn.h>

// CPython's C API is found by name in the process: no link to libpython, no headers of one version.

namespace oomdiag {

/// A PyObject or PyFrameObject.
using PythonObject = void*;

/// PyMethodDef, which is part of the stable ABI. To live as long as the functions that are made of it.
struct PythonMethod {
  static constexpr int kNoArguments = 4, kOneArgument = 8;  // METH_NOARGS, METH_O
  const char* name;
  PythonObject (*function)(PythonObject self, PythonObject argument);
  int flags;
  const char* doc;
};

namespace python_symbols {

/// Sets `symbol` to the function or object of the C API with this name; null and false if there is none.
template <class F>
bool find(F& symbol, const char* name) noexcept {
  symbol = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
  return symbol != nullptr;
}

/// Of the interpreter in this process, "3.14.0 free-threading build (main, …)"; empty where there is none.
inline const char* version() noexcept {
  const char* (*get)() = nullptr;
  return find(get, "Py_GetVersion") ? get() : "";
}

}  // namespace python_symbols
}  // namespace oomdiag
