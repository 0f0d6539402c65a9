#pragma once

#include <cstdint>
#include <string>

namespace oomdiag {

/// A PyObject or PyFrameObject.
using PythonObject = void*;

/// The part of CPython's C API that the recorder calls, found by name in the process: no link to libpython, no headers of
/// one version. All of it is documented. Everything but the first six needs the GIL.
struct PythonApi {
  int (*is_initialized)() = nullptr;
  PythonObject (*this_thread)() = nullptr;  ///< PyGILState_GetThisThreadState
  int (*ensure)() = nullptr;
  void (*release)(int) = nullptr;
  int (*check)() = nullptr;
  int (*is_finalizing)() = nullptr;  ///< public from 3.13, underscored before; may be null

  PythonObject (*frame)() = nullptr;  ///< borrowed
  PythonObject (*frame_code)(PythonObject) = nullptr;
  PythonObject (*frame_back)(PythonObject) = nullptr;
  int (*frame_line)(PythonObject) = nullptr;
  int (*frame_instruction)(PythonObject) = nullptr;
  PythonObject (*frame_variable)(PythonObject, const char*) = nullptr;  ///< from 3.12; may be null
  PythonObject (*frame_locals)(PythonObject) = nullptr;

  void (*incref)(PythonObject) = nullptr;
  void (*decref)(PythonObject) = nullptr;
  PythonObject (*attribute)(PythonObject, const char*) = nullptr;
  PythonObject (*call)(PythonObject, PythonObject) = nullptr;  ///< with a tuple of arguments
  PythonObject (*tuple)(intptr_t) = nullptr;
  int (*tuple_set)(PythonObject, intptr_t, PythonObject) = nullptr;  ///< steals the item
  const char* (*utf8)(PythonObject) = nullptr;
  PythonObject (*item)(PythonObject, PythonObject) = nullptr;
  PythonObject (*intern)(const char*) = nullptr;
  PythonObject (*dict_get)(PythonObject, const char*) = nullptr;  ///< borrowed
  int (*dict_set)(PythonObject, const char*, PythonObject) = nullptr;
  PythonObject (*add_module)(const char*) = nullptr;    ///< borrowed
  PythonObject (*module_dict)(PythonObject) = nullptr;  ///< borrowed
  PythonObject (*import)(const char*) = nullptr;
  PythonObject (*run)(const char*, int, PythonObject, PythonObject) = nullptr;
  PythonObject (*error)() = nullptr;
  void (*clear_error)() = nullptr;

  /// Finds all of it. False if there is no (running) interpreter in the process.
  bool load();
  /// A text attribute, empty if there is none.
  std::string text(PythonObject object, const char* name) const;
  /// The local variable `self` of a frame, a new reference, or null.
  PythonObject self_of(PythonObject frame) const;

  PythonObject self_name = nullptr;  ///< the text "self"; made by the first caller of `intern`
};

}  // namespace oomdiag
