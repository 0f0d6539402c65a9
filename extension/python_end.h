#pragma once

#include <dlfcn.h>

namespace oomdiag {

/// What runs when Python begins to end, with the GIL: `release` and `restore` let go of it and take it again, as in
/// Py_BEGIN_ALLOW_THREADS.
struct PythonEnd {
  void* (*release)() = nullptr;
  void (*restore)(void*) = nullptr;
};
using AtPythonEnd = void (*)(const PythonEnd&) noexcept;

/// Asks the interpreter that is in the process, if there is one, to call `function` as its `atexit` module does: before
/// anything is torn down, after what was registered later. Any thread, with the GIL or without: the main thread registers
/// it when it next runs Python.
template <AtPythonEnd function>
void call_at_python_end() noexcept {
  struct Method {  // PyMethodDef, the same in all versions
    const char* name;
    void* (*call)(void*, void*);
    int flags;
    const char* doc;
  };
  constexpr int kNoArguments = 0x0004;  // METH_NOARGS
  static Method method{"oomdiag_python_ends",
                       [](void*, void*) -> void* {
                         PythonEnd python{
                             .release = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread")),
                             .restore = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"))};
                         if (python.release != nullptr && python.restore != nullptr) function(python);
                         void* none = dlsym(RTLD_DEFAULT, "_Py_NoneStruct");
                         if (none != nullptr) reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "Py_IncRef"))(none);
                         return none;
                       },
                       kNoArguments, nullptr};
  const auto later = reinterpret_cast<int (*)(int (*)(void*), void*)>(dlsym(RTLD_DEFAULT, "Py_AddPendingCall"));
  if (later == nullptr) return;
  later(
      [](void*) {
        const auto find = [](const char* name) { return dlsym(RTLD_DEFAULT, name); };
        const auto text = reinterpret_cast<void* (*)(const char*)>(find("PyUnicode_FromString"));
        const auto loaded = reinterpret_cast<void* (*)(void*)>(find("PyImport_GetModule"));
        const auto callable = reinterpret_cast<void* (*)(Method*, void*)>(find("PyCFunction_New"));
        const auto attribute = reinterpret_cast<void* (*)(void*, const char*)>(find("PyObject_GetAttrString"));
        const auto invoke = reinterpret_cast<void* (*)(void*, void*, ...)>(find("PyObject_CallFunctionObjArgs"));
        const auto release = reinterpret_cast<void (*)(void*)>(find("Py_DecRef"));
        const auto forget_error = reinterpret_cast<void (*)()>(find("PyErr_Clear"));
        if (!text || !loaded || !callable || !attribute || !invoke || !release || !forget_error) return 0;
        void* name = text("atexit");
        void* module = loaded(name);  // of a program that has torch; not imported here: that would run code
        void* ends = callable(&method, nullptr);
        void* registration = module == nullptr ? nullptr : attribute(module, "register");
        void* result = registration == nullptr ? nullptr : invoke(registration, ends, nullptr);
        for (void* object : {result, registration, ends, module, name}) release(object);  // null is allowed
        if (result == nullptr) forget_error();
        return 0;
      },
      nullptr);
}

}  // namespace oomdiag
