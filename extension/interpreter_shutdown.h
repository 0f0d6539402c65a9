#pragma once

#include <initializer_list>

#include "extension/python_symbols.h"

namespace oomdiag {

/// What a function that runs when the interpreter begins to shut down, holding the GIL, drops and takes it with, as
/// Py_BEGIN_ALLOW_THREADS does.
struct InterpreterShutdown {
  void* (*release)() = nullptr;
  void (*restore)(void*) = nullptr;
};
using OnInterpreterShutdown = void (*)(const InterpreterShutdown&) noexcept;

/// What registering with the `atexit` module calls. All of it needs the GIL.
struct AtexitApi {
  PythonObject (*text)(const char*) = nullptr;
  PythonObject (*module)(PythonObject) = nullptr;  ///< one that is imported
  PythonObject (*function)(PythonMethod*, PythonObject) = nullptr;
  PythonObject (*attribute)(PythonObject, const char*) = nullptr;
  PythonObject (*call)(PythonObject, PythonObject, ...) = nullptr;
  void (*decref)(PythonObject) = nullptr;
  void (*clear_error)() = nullptr;

  bool load() noexcept {
    using python_symbols::find;
    return find(text, "PyUnicode_FromString") && find(module, "PyImport_GetModule") &&
           find(function, "PyCFunction_New") && find(attribute, "PyObject_GetAttrString") &&
           find(call, "PyObject_CallFunctionObjArgs") && find(decref, "Py_DecRef") && find(clear_error, "PyErr_Clear");
  }

  /// atexit.register(method). The module is there in every program that has torch; importing it here would run code.
  void register_method(PythonMethod& method) const noexcept {
    PythonObject name = text("atexit");
    PythonObject atexit = module(name);
    PythonObject callback = function(&method, nullptr);
    PythonObject registration = atexit == nullptr ? nullptr : attribute(atexit, "register");
    PythonObject result = registration == nullptr ? nullptr : call(registration, callback, nullptr);
    for (PythonObject object : {result, registration, callback, atexit, name}) decref(object);  // null is allowed
    if (result == nullptr) clear_error();
  }
};

/// None, a new reference; null where the interpreter does not have the two symbols.
inline PythonObject new_none() noexcept {
  PythonObject none = nullptr;
  void (*incref)(PythonObject) = nullptr;
  if (python_symbols::find(none, "_Py_NoneStruct") && python_symbols::find(incref, "Py_IncRef")) incref(none);
  return none;
}

/// Asks the interpreter that is in the process, if there is one, to call `on_shutdown` as its `atexit` module does: before
/// anything is torn down, after what was registered later. Any thread, with the GIL or without: the main thread registers
/// it when it next runs Python.
template <OnInterpreterShutdown on_shutdown>
void call_at_interpreter_shutdown() noexcept {
  static PythonMethod method{
      "oomdiag_interpreter_shutdown",
      [](PythonObject, PythonObject) -> PythonObject {
        using python_symbols::find;
        InterpreterShutdown python;
        if (find(python.release, "PyEval_SaveThread") && find(python.restore, "PyEval_RestoreThread")) {
          on_shutdown(python);
        }
        return new_none();
      },
      PythonMethod::kNoArguments, nullptr};
  int (*add_pending_call)(int (*)(void*), void*) = nullptr;
  if (!python_symbols::find(add_pending_call, "Py_AddPendingCall")) return;
  add_pending_call(
      [](void*) {
        AtexitApi api;
        if (api.load()) api.register_method(method);
        return 0;
      },
      nullptr);
}

}  // namespace oomdiag
