#include "extension/record/python_api.h"

#include <dlfcn.h>

namespace oomdiag {

namespace {

template <class F>
bool find(F& function, const char* name) {
  function = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
  return function != nullptr;
}

}  // namespace

bool PythonApi::load() {
  if (!find(is_finalizing, "Py_IsFinalizing")) find(is_finalizing, "_Py_IsFinalizing");
  find(frame_variable, "PyFrame_GetVarString");
  return find(is_initialized, "Py_IsInitialized") && find(this_thread, "PyGILState_GetThisThreadState") &&
         find(ensure, "PyGILState_Ensure") && find(release, "PyGILState_Release") && find(check, "PyGILState_Check") &&
         find(frame, "PyEval_GetFrame") && find(frame_code, "PyFrame_GetCode") && find(frame_back, "PyFrame_GetBack") &&
         find(frame_line, "PyFrame_GetLineNumber") && find(frame_instruction, "PyFrame_GetLasti") &&
         find(frame_locals, "PyFrame_GetLocals") && find(incref, "Py_IncRef") && find(decref, "Py_DecRef") &&
         find(attribute, "PyObject_GetAttrString") && find(call, "PyObject_CallObject") && find(tuple, "PyTuple_New") &&
         find(tuple_set, "PyTuple_SetItem") && find(utf8, "PyUnicode_AsUTF8") && find(item, "PyObject_GetItem") &&
         find(intern, "PyUnicode_InternFromString") && find(dict_get, "PyDict_GetItemString") &&
         find(dict_set, "PyDict_SetItemString") && find(add_module, "PyImport_AddModule") &&
         find(module_dict, "PyModule_GetDict") && find(import, "PyImport_ImportModule") && find(run, "PyRun_String") &&
         find(error, "PyErr_Occurred") && find(clear_error, "PyErr_Clear") && is_initialized() != 0;
}

std::string PythonApi::text(PythonObject object, const char* name) const {
  PythonObject value = attribute(object, name);
  const char* characters = value == nullptr ? nullptr : utf8(value);
  std::string result = characters == nullptr ? "" : characters;
  if (value != nullptr) decref(value);
  if (error() != nullptr) clear_error();
  return result;
}

// Before 3.12 there is only the dictionary of all locals, which the frame then keeps. It is asked only of frames that
// hold their variables until they return anyway.
PythonObject PythonApi::self_of(PythonObject in_frame) const {
  PythonObject value = nullptr;
  if (frame_variable != nullptr) {
    value = frame_variable(in_frame, "self");
  } else if (PythonObject locals = frame_locals(in_frame); locals != nullptr) {
    value = item(locals, self_name);
    decref(locals);
  }
  if (value == nullptr && error() != nullptr) clear_error();
  return value;
}

}  // namespace oomdiag
