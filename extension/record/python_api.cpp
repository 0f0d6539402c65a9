#include "extension/record/python_api.h"

#include "extension/python_symbols.h"

namespace oomdiag {

namespace {

using python_symbols::find;

bool load_frames(PythonApi& api) {
  find(api.frame_variable, "PyFrame_GetVarString");
  find(api.frame_instruction, "PyFrame_GetLasti");
  find(api.frame_locals, "PyFrame_GetLocals");
  find(api.frame_globals, "PyFrame_GetGlobals");
  return find(api.frame, "PyEval_GetFrame") && find(api.frame_code, "PyFrame_GetCode") &&
         find(api.frame_back, "PyFrame_GetBack") && find(api.frame_line, "PyFrame_GetLineNumber") &&
         find(api.code_line, "PyCode_Addr2Line") && find(api.function_code, "PyFunction_GetCode") &&
         find(api.function_type, "PyFunction_Type") && find(api.type_type, "PyType_Type");
}

bool load_objects(PythonApi& api) {
  find(api.type_name, "PyType_GetName");
  find(api.visit_objects, "PyUnstable_GC_VisitObjects");
  find(api.type_slot, "PyType_GetSlot");
  find(api.is_tracked, "PyObject_GC_IsTracked");
  return find(api.incref, "Py_IncRef") && find(api.decref, "Py_DecRef") &&
         find(api.attribute, "PyObject_GetAttrString") && find(api.plain_attribute, "PyObject_GenericGetAttr") &&
         find(api.plain_dict, "PyObject_GenericGetDict") && find(api.type, "PyObject_Type") &&
         find(api.is_subtype, "PyType_IsSubtype") && find(api.call, "PyObject_CallObject") &&
         find(api.tuple, "PyTuple_New") && find(api.tuple_size, "PyTuple_Size") &&
         find(api.tuple_get, "PyTuple_GetItem") && find(api.list_size, "PyList_Size") &&
         find(api.list_get, "PyList_GetItem") && find(api.utf8, "PyUnicode_AsUTF8") &&
         find(api.encoded, "PyUnicode_AsEncodedString") && find(api.bytes, "PyBytes_AsString") &&
         find(api.item, "PyObject_GetItem") && find(api.intern, "PyUnicode_InternFromString") &&
         find(api.to_pointer, "PyLong_AsVoidPtr") && find(api.to_long, "PyLong_AsLong") &&
         find(api.from_pointer, "PyLong_FromVoidPtr") && find(api.dict_get, "PyDict_GetItemString") &&
         find(api.dict_next, "PyDict_Next") && find(api.modules, "PyImport_GetModuleDict") &&
         find(api.weak, "PyWeakref_NewRef") && find(api.function, "PyCFunction_NewEx") &&
         find(api.none, "_Py_NoneStruct") && find(api.dict_type, "PyDict_Type") && find(api.list_type, "PyList_Type") &&
         find(api.tuple_type, "PyTuple_Type") && find(api.text_type, "PyUnicode_Type") &&
         find(api.integer_type, "PyLong_Type") && find(api.c_function_type, "PyCFunction_Type") &&
         find(api.method_type, "PyMethod_Type") && find(api.method_function, "PyMethod_Function");
}

}  // namespace

bool PythonApi::load() {
  if (!find(is_finalizing, "Py_IsFinalizing")) find(is_finalizing, "_Py_IsFinalizing");
  if (!find(current_thread, "PyThreadState_GetUnchecked")) find(current_thread, "_PyThreadState_UncheckedGet");
  find(first_interpreter, "PyInterpreterState_Head");
  find(main_interpreter, "PyInterpreterState_Main");
  return find(is_initialized, "Py_IsInitialized") && find(this_thread, "PyGILState_GetThisThreadState") &&
         find(ensure, "PyGILState_Ensure") && find(release, "PyGILState_Release") && find(check, "PyGILState_Check") &&
         find(error, "PyErr_Occurred") && find(clear_error, "PyErr_Clear") && load_frames(*this) &&
         load_objects(*this) && is_initialized() != 0;
}

std::string PythonApi::text_of(PythonObject str) const {
  if (const char* characters = utf8(str); characters != nullptr) return characters;
  clear_error();
  PythonObject escaped = encoded(str, "utf-8", "backslashreplace");
  const char* characters = escaped == nullptr ? nullptr : bytes(escaped);
  std::string result = characters == nullptr ? "" : characters;
  if (escaped != nullptr) decref(escaped);
  if (error() != nullptr) clear_error();
  return result;
}

std::string PythonApi::text(PythonObject object, const char* name) const {
  PythonObject value = attribute(object, name);
  std::string result = value == nullptr ? "" : text_of(value);
  if (value != nullptr) decref(value);
  if (error() != nullptr) clear_error();
  return result;
}

// Before 3.12 there is only the dictionary of all locals, which the frame then keeps. It is asked only of frames that
// hold their variables until they return anyway.
PythonObject PythonApi::variable_of(PythonObject in_frame, const char* name, PythonObject name_object) const {
  PythonObject value = nullptr;
  if (frame_variable != nullptr) {
    value = frame_variable(in_frame, name);
  } else if (PythonObject locals = name_object == nullptr ? nullptr : locals_of(in_frame); locals != nullptr) {
    value = item(locals, name_object);
    decref(locals);
  }
  if (value == nullptr && error() != nullptr) clear_error();
  return value;
}

bool PythonReader::is_a(PythonObject object, PythonObject type) const {
  if (object == nullptr || type == nullptr) return false;
  const PythonRef own(api_, api_.type(object));
  return own.get() == type || api_.is_subtype(own.get(), type) != 0;
}

PythonRef PythonReader::dict_of(PythonObject object) const {
  PythonRef dict(api_, api_.plain_dict(object, nullptr));
  if (!dict) api_.clear_error();
  return dict;
}

PythonRef PythonReader::entry(PythonObject dict, const char* name) const {
  if (!is_a(dict, api_.dict_type)) return {};
  return PythonRef::borrowed(api_, api_.dict_get(dict, name));
}

std::vector<std::pair<PythonRef, PythonRef>> PythonReader::pairs(PythonObject dict) const {
  std::vector<std::pair<PythonRef, PythonRef>> result;
  if (!is_a(dict, api_.dict_type)) return result;
  intptr_t place = 0;
  PythonObject key = nullptr;
  PythonObject value = nullptr;
  while (api_.dict_next(dict, &place, &key, &value) != 0) {
    result.emplace_back(PythonRef::borrowed(api_, key), PythonRef::borrowed(api_, value));
  }
  return result;
}

std::vector<std::pair<std::string, PythonRef>> PythonReader::entries(PythonObject dict) const {
  std::vector<std::pair<std::string, PythonRef>> result;
  for (auto& [key, value] : pairs(dict)) {
    if (is_a(key.get(), api_.text_type)) result.emplace_back(text(key.get()), std::move(value));
  }
  return result;
}

std::vector<PythonRef> PythonReader::items(PythonObject sequence) const {
  std::vector<PythonRef> result;
  const bool is_list = is_a(sequence, api_.list_type);
  if (!is_list && !is_a(sequence, api_.tuple_type)) return result;
  const intptr_t count = is_list ? api_.list_size(sequence) : api_.tuple_size(sequence);
  for (intptr_t i = 0; i < count; ++i) {
    result.push_back(PythonRef::borrowed(api_, is_list ? api_.list_get(sequence, i) : api_.tuple_get(sequence, i)));
  }
  return result;
}

PythonRef PythonReader::attribute(PythonObject object, const char* name) const {
  const PythonRef key(api_, api_.intern(name));
  PythonRef value(api_, key ? api_.plain_attribute(object, key.get()) : nullptr);
  if (!value) api_.clear_error();
  return value;
}

PythonRef PythonReader::find(const char* module, const char* name) const {
  const PythonRef found = entry(api_.modules(), module);
  return found ? entry(dict_of(found.get()).get(), name) : PythonRef();
}

bool PythonReader::is_of_c(PythonObject function) const {
  if (!is_a(function, api_.method_type)) return is_a(function, api_.c_function_type);
  return is_a(api_.method_function(function), api_.c_function_type);
}

PythonRef PythonReader::call_builtin(PythonObject object, const char* method) const {
  const PythonRef function = attribute(object, method);
  const PythonRef arguments(api_, api_.tuple(0));
  if (!is_of_c(function.get())) return {};
  PythonRef result(api_, arguments ? api_.call(function.get(), arguments.get()) : nullptr);
  if (!result) api_.clear_error();
  return result;
}

std::string PythonReader::type_name(PythonObject object) const {
  const PythonRef own(api_, api_.type(object));
  const PythonRef name =
      api_.type_name == nullptr ? attribute(own.get(), "__name__") : PythonRef(api_, api_.type_name(own.get()));
  return text(name.get());
}

std::string PythonReader::text(PythonObject object) const {
  return is_a(object, api_.text_type) ? api_.text_of(object) : "";
}

std::optional<long> PythonReader::integer(PythonObject object) const {
  if (!is_a(object, api_.integer_type)) return std::nullopt;
  const long number = api_.to_long(object);
  if (api_.error() == nullptr) return number;
  api_.clear_error();  // it has more bits
  return std::nullopt;
}

}  // namespace oomdiag
