#pragma once

#include <string>
#include <unordered_map>

#include "extension/python_symbols.h"
#include "extension/record/object_table.h"
#include "extension/record/python_api.h"
#include "extension/record/python_tensor.h"

namespace oomdiag {

/// The program's optimizers, and which tensors belong to which of their parameter groups, which is written to the
/// trace. All of it with the GIL.
class OptimizerNames {
 public:
  explicit OptimizerNames(const PythonApi& api) : api_(api), reader_(api), tensors_(api), names_(api) {}

  bool knows(PythonObject optimizer) const { return names_.find(optimizer) != nullptr; }
  /// Does nothing for what is no optimizer.
  void add(PythonObject optimizer);
  /// Registers all live optimizers, where none was registered yet: once, it takes some tenths of a second. Before
  /// Python 3.12 only those that are variables of modules: `gc.get_objects` is the program's to replace, and audit
  /// hooks hear of it.
  void search();
  /// Registers the optimizers among `objects` (each with a member `object`), where none was registered yet: a search
  /// before Python 3.12 does not come to those that are variables of functions. Then writes their groups.
  template <class Objects>
  void register_among(const Objects& objects) {
    if (!names_.all().empty()) return;
    const PythonRef base = reader_.find("torch.optim.optimizer", "Optimizer");
    for (const auto& one : objects) {
      if (base && reader_.is_a(one.object, base.get())) add(one.object);
    }
    write_groups();
  }
  /// Writes the parameters, gradients and states of all registered optimizers.
  void write_groups();
  /// If `optimizer` is registered and has several groups, writes that the OOM on this thread was for this one of them.
  void write_failed(PythonObject optimizer, PythonObject group);

 private:
  void write_groups_of(PythonObject optimizer, const std::string& name);
  void write_states(PythonObject optimizer_dict, const std::unordered_map<PythonObject, uint32_t>& group_of);
  void write_member(PythonObject value, uint32_t group);
  std::vector<PythonRef> list_instances(PythonObject type) const;
  template <class Visit>
  void for_each_global(Visit visit) const;
  std::string group_name(const std::string& optimizer, size_t index, PythonObject group) const;

  const PythonApi& api_;
  PythonReader reader_;
  TensorReader tensors_;
  ObjectTable<std::string> names_;
  std::unordered_map<std::string, int> counts_;  ///< optimizers of each type
  bool searched_ = false;
};

}  // namespace oomdiag
