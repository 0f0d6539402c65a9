#pragma once

#include <functional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "extension/python_symbols.h"
#include "extension/record/object_table.h"
#include "extension/record/python_api.h"
#include "extension/record/python_tensor.h"
#include "profiler/event.h"

namespace oomdiag {

/// How a Python object is named.
struct ObjectName {
  std::string path;  ///< below the whole model; empty of that, which is named by its type
  uint32_t id = 0;   ///< of the name, in the trace
};

/// The paths of the program's modules ("layer3.5.conv2"), by their places below the whole model: the module that was called
/// first, or one of the callers' variables that has it below (`vae` where `vae.encoder(x)` is called). And the names of their
/// parameters and buffers, which are written to the trace. All of it with the GIL.
class ModuleNames {
 public:
  explicit ModuleNames(const PythonApi& api) : api_(api), reader_(api), tensors_(api), names_(api), wholes_(api) {}

  /// The path of a module, an id of the trace; 0 if it has none.
  uint32_t find(PythonObject module) const;

  /// How many modules that have paths have died: what was found of an address holds until then. Any thread.
  uint64_t deaths() const noexcept { return names_.deaths(); }

  /// What the variables of the functions that run refer to, of the innermost function first.
  using ReadVariables = std::function<std::vector<PythonRef>()>;

  /// The path of the innermost module that has one, of a stack of modules that are being called, innermost first. Names those
  /// that are new: the whole model by its type, the others by their places below it. A module that is nowhere below it, such
  /// as an activation made in forward, has none.
  uint32_t name_calls(std::span<const PythonRef> calls, const ReadVariables& read_variables);

 private:
  void name_tree(PythonObject root, const std::string& path);
  void name_below(PythonObject module, const std::string& path);
  bool has_tables(PythonObject dict) const;
  std::vector<std::pair<std::string, PythonRef>> registered(PythonObject dict, const char* which) const;
  void write_tensors(PythonObject dict, const char* which, EventKind kind, const std::string& path);
  bool is_worth_a_search(PythonObject caller, PythonObject module);
  uint32_t& count_strangers(PythonObject caller, PythonObject module);
  std::string find_path(PythonObject called, const ReadVariables& read_variables);
  std::string find_path_in_known(PythonObject called);
  PythonRef find_whole_model(PythonObject called, const ReadVariables& read_variables);
  std::string path_below(PythonObject module, PythonObject searched);
  bool extend_path(PythonObject module, PythonObject searched, std::string& path);

  const PythonApi& api_;
  PythonReader reader_;
  TensorReader tensors_;
  ObjectTable<ObjectName> names_;
  ObjectTable<uint32_t> wholes_;  ///< models that were found in variables, in this order
  uint32_t wholes_found_ = 0;
  bool root_is_new_ = false;
  std::unordered_set<PythonObject> seen_;             ///< in the search that runs
  std::unordered_map<uint64_t, uint32_t> strangers_;  ///< calls of modules without a name, by caller (or none) and type
};

}  // namespace oomdiag
