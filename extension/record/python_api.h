#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "extension/python_symbols.h"

namespace oomdiag {

/// The part of CPython's C API that the recorder calls, found by name in the process (python_symbols.h). All of it is documented. Everything but the first six needs the GIL.
///
/// Nothing here runs a line of Python, but for what destructors do when the last reference goes meanwhile: dictionaries, lists
/// and slots are read as such, attributes without asking the object's class or its metaclass, and only functions of C are
/// called, none that an audit hook hears of. So the program's own functions are not called, its signal handlers do not run in
/// the middle of ours, and what they raise arrives where it would without us.
struct PythonApi {
  int (*is_initialized)() = nullptr;
  PythonObject (*this_thread)() = nullptr;  ///< PyGILState_GetThisThreadState
  int (*ensure)() = nullptr;
  void (*release)(int) = nullptr;
  int (*check)() = nullptr;
  PythonObject (*current_thread)() = nullptr;  ///< PyThreadState_GetUnchecked, underscored before 3.13; may be null
  PythonObject (*first_interpreter)() = nullptr;
  PythonObject (*main_interpreter)() = nullptr;
  int (*is_finalizing)() = nullptr;  ///< public from 3.13, underscored before; may be null

  PythonObject (*frame)() = nullptr;  ///< borrowed
  PythonObject (*frame_code)(PythonObject) = nullptr;
  PythonObject (*frame_back)(PythonObject) = nullptr;
  int (*frame_line)(PythonObject) = nullptr;
  int (*frame_instruction)(PythonObject) = nullptr;                     ///< from 3.11; may be null
  int (*code_line)(PythonObject, int) = nullptr;                        ///< of an instruction
  PythonObject (*frame_variable)(PythonObject, const char*) = nullptr;  ///< from 3.12; may be null
  PythonObject (*frame_locals)(PythonObject) = nullptr;                 ///< from 3.11; may be null, as the next
  PythonObject (*frame_globals)(PythonObject) = nullptr;
  PythonObject (*function_code)(PythonObject) = nullptr;  ///< borrowed

  void (*incref)(PythonObject) = nullptr;
  void (*decref)(PythonObject) = nullptr;
  PythonObject (*attribute)(PythonObject, const char*) = nullptr;         ///< only of code and frames
  PythonObject (*plain_attribute)(PythonObject, PythonObject) = nullptr;  ///< of any object: PyObject_GenericGetAttr
  PythonObject (*plain_dict)(PythonObject, void*) = nullptr;              ///< its __dict__: PyObject_GenericGetDict
  PythonObject (*type)(PythonObject) = nullptr;
  PythonObject (*type_name)(PythonObject) = nullptr;  ///< from 3.11; may be null
  int (*is_subtype)(PythonObject, PythonObject) = nullptr;
  PythonObject (*method_function)(PythonObject) = nullptr;  ///< of a bound method, borrowed
  /// PyUnstable_GC_VisitObjects: all objects that the collector knows, until the visitor returns 0. From 3.12; may be null.
  void (*visit_objects)(int (*)(PythonObject, void*), void*) = nullptr;
  void* (*type_slot)(PythonObject, int) = nullptr;             ///< PyType_GetSlot; may be null
  int (*is_tracked)(PythonObject) = nullptr;                   ///< PyObject_GC_IsTracked; may be null
  PythonObject (*call)(PythonObject, PythonObject) = nullptr;  ///< a C function, with a tuple of arguments
  PythonObject (*tuple)(intptr_t) = nullptr;
  intptr_t (*tuple_size)(PythonObject) = nullptr;
  PythonObject (*tuple_get)(PythonObject, intptr_t) = nullptr;  ///< borrowed
  intptr_t (*list_size)(PythonObject) = nullptr;
  PythonObject (*list_get)(PythonObject, intptr_t) = nullptr;  ///< borrowed
  const char* (*utf8)(PythonObject) = nullptr;
  PythonObject (*encoded)(PythonObject, const char*, const char*) = nullptr;  ///< PyUnicode_AsEncodedString
  char* (*bytes)(PythonObject) = nullptr;                                     ///< PyBytes_AsString
  PythonObject (*item)(PythonObject, PythonObject) = nullptr;
  PythonObject (*intern)(const char*) = nullptr;
  void* (*to_pointer)(PythonObject) = nullptr;
  long (*to_long)(PythonObject) = nullptr;
  PythonObject (*from_pointer)(void*) = nullptr;
  PythonObject (*dict_get)(PythonObject, const char*) = nullptr;  ///< borrowed
  int (*dict_next)(PythonObject, intptr_t*, PythonObject*, PythonObject*) = nullptr;
  PythonObject (*modules)() = nullptr;  ///< sys.modules, borrowed
  PythonObject (*weak)(PythonObject, PythonObject) = nullptr;
  PythonObject (*function)(void*, PythonObject, PythonObject) = nullptr;  ///< PyCFunction_NewEx
  PythonObject (*error)() = nullptr;
  void (*clear_error)() = nullptr;

  PythonObject none = nullptr, dict_type = nullptr, list_type = nullptr, tuple_type = nullptr, text_type = nullptr;
  PythonObject integer_type = nullptr;
  PythonObject function_type = nullptr, type_type = nullptr, c_function_type = nullptr, method_type = nullptr;

  /// Finds all of it. False if there is no (running) interpreter in the process.
  bool load();
  /// Whether this thread holds the GIL. PyGILState_Check is no help: once there was a second interpreter it says always yes.
  bool holds_gil() const { return current_thread == nullptr ? check() != 0 : current_thread() == this_thread(); }
  /// While there are other interpreters, PyGILState_Ensure may wait for a GIL that this thread itself holds for one of them.
  /// The newest one is the first of Python's list, whose lock is not ours to take: so none of them is followed.
  bool has_subinterpreters() const {
    return first_interpreter != nullptr && main_interpreter != nullptr && first_interpreter() != main_interpreter();
  }
  /// Of a str, in UTF-8; what has no place there, as a byte of a file name, is escaped as Python prints it: "\\udcfc".
  std::string text_of(PythonObject str) const;
  /// A text attribute of code, empty if there is none.
  std::string text(PythonObject object, const char* name) const;
  /// What distinguishes two places of a function: the instruction that runs, before Python 3.11 its line.
  int place_in(PythonObject in_frame) const {
    return frame_instruction != nullptr ? frame_instruction(in_frame) : frame_line(in_frame);
  }
  /// The variables of a frame's module and of the frame itself, new references; null with an error where there are none.
  PythonObject globals_of(PythonObject in_frame) const {
    return frame_globals != nullptr ? frame_globals(in_frame) : attribute(in_frame, "f_globals");
  }
  PythonObject locals_of(PythonObject in_frame) const {
    return frame_locals != nullptr ? frame_locals(in_frame) : attribute(in_frame, "f_locals");
  }
  /// The local variable `name` of a frame, a new reference, or null. `name_object` is the same text.
  PythonObject variable_of(PythonObject in_frame, const char* name, PythonObject name_object) const;
  /// The local variable `self` of a frame, a new reference, or null.
  PythonObject self_of(PythonObject in_frame) const { return variable_of(in_frame, "self", self_name); }

  PythonObject self_name = nullptr;  ///< the text "self"; made by the first caller of `intern`
};

/// A reference to a Python object, or none. To be made, copied and dropped with the GIL.
class PythonRef {
 public:
  PythonRef() = default;
  /// Takes over a reference.
  PythonRef(const PythonApi& api, PythonObject owned) : api_(&api), object_(owned) {}
  /// One more reference.
  static PythonRef borrowed(const PythonApi& api, PythonObject object) {
    if (object != nullptr) api.incref(object);
    return {api, object};
  }
  PythonRef(PythonRef&& other) noexcept : api_(other.api_), object_(std::exchange(other.object_, nullptr)) {}
  PythonRef& operator=(PythonRef&& other) noexcept {
    std::swap(api_, other.api_);
    std::swap(object_, other.object_);
    return *this;
  }
  ~PythonRef() {
    if (object_ != nullptr) api_->decref(object_);
  }

  PythonObject get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  const PythonApi* api_ = nullptr;
  PythonObject object_ = nullptr;
};

/// What can be read of the program's objects without running its code. Nothing is raised: what is not there is empty.
class PythonReader {
 public:
  explicit PythonReader(const PythonApi& api) : api_(api) {}

  bool is_a(PythonObject object, PythonObject type) const;
  /// The __dict__ of an object, empty if it has none.
  PythonRef dict_of(PythonObject object) const;
  /// An entry of a dict, empty if there is none or `dict` is none.
  PythonRef entry(PythonObject dict, const char* name) const;
  /// The entries of a dict that have texts as keys, empty if it is no dict.
  std::vector<std::pair<std::string, PythonRef>> entries(PythonObject dict) const;
  /// The keys and values of a dict, empty if it is no dict.
  std::vector<std::pair<PythonRef, PythonRef>> pairs(PythonObject dict) const;
  /// The items of a list or tuple, empty if it is neither.
  std::vector<PythonRef> items(PythonObject sequence) const;
  /// A slot or instance attribute, empty if there is none.
  PythonRef attribute(PythonObject object, const char* name) const;
  /// What a loaded module calls by this name, empty if it is not loaded.
  PythonRef find(const char* module, const char* name) const;
  /// Whether it is a function of C, or such a method bound to its object: to call it runs no Python.
  bool is_of_c(PythonObject function) const;
  /// What a method without arguments that is a function of C gives; empty if it is none, or fails.
  PythonRef call_builtin(PythonObject object, const char* method) const;
  std::string type_name(PythonObject object) const;
  std::string text(PythonObject object) const;
  /// Of an int or bool: of another object its __index__ would be asked.
  std::optional<long> integer(PythonObject object) const;

 private:
  const PythonApi& api_;
};

}  // namespace oomdiag
