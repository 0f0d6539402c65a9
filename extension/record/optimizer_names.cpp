#include "extension/record/optimizer_names.h"

#include <c10/core/TensorImpl.h>

#include "extension/python_symbols.h"
#include "extension/record/internal_names.h"
#include "extension/record/python_api.h"
#include "extension/record/session.h"
#include "extension/record/tensor_event.h"
#include "extension/record/thread_state.h"
#include "profiler/event.h"
#include "profiler/trace/group_role.h"

namespace oomdiag {

namespace {

/// Its address and size may stay zero: then it stands for the group itself.
Event group_event(uint32_t group) {
  Event event = thread_state().event(EventKind::grouped);
  event.detail = group;
  return event;
}

void write_tensor(const c10::TensorImpl& tensor, uint32_t group, int role) {
  Event event = group_event(group);
  event.flags = static_cast<uint16_t>(role);
  if (locate_storage(tensor, event)) session().writer().write(event);
}

}  // namespace

void OptimizerNames::add(PythonObject optimizer) {
  const PythonRef base = reader_.find("torch.optim.optimizer", "Optimizer");
  if (!reader_.is_a(optimizer, base.get())) return;
  const PythonRef groups = reader_.entry(reader_.dict_of(optimizer).get(), "param_groups");
  if (!reader_.is_a(groups.get(), api_.list_type)) return note_missing(InternalName::parameter_groups);
  if (knows(optimizer)) return;
  const std::string type = reader_.type_name(optimizer);
  const int count = ++counts_[type];
  names_.add(optimizer, count == 1 ? type : type + " " + std::to_string(count));
}

void OptimizerNames::search() {
  if (searched_ || !names_.all().empty()) return;
  const PythonRef base = reader_.find("torch.optim.optimizer", "Optimizer");
  if (!base) return;
  searched_ = true;
  for (const PythonRef& optimizer : list_instances(base.get())) add(optimizer.get());
}

std::vector<PythonRef> OptimizerNames::list_instances(PythonObject type) const {
  struct Search {
    const OptimizerNames& names;
    PythonObject type;
    std::vector<PythonRef> found{};
  } search{*this, type};
  const auto visit = [](PythonObject object, void* in) {
    auto& [names, base, found] = *static_cast<Search*>(in);
    if (names.reader_.is_a(object, base)) found.push_back(PythonRef::borrowed(names.api_, object));
    return 1;
  };
  if (api_.visit_objects != nullptr) {
    api_.visit_objects(visit, &search);
  } else {
    for_each_global([&](PythonObject object) { visit(object, &search); });
  }
  return std::move(search.found);
}

template <class Visit>
void OptimizerNames::for_each_global(Visit visit) const {
  for (const auto& [name, module] : reader_.entries(api_.modules())) {
    for (const auto& [variable, value] : reader_.pairs(reader_.dict_of(module.get()).get())) visit(value.get());
  }
}

void OptimizerNames::write_groups() {
  for (PythonObject optimizer : names_.all()) {
    const PythonRef held = PythonRef::borrowed(api_, optimizer);
    if (const std::string* name = names_.find(optimizer)) write_groups_of(optimizer, std::string(*name));
  }
}

void OptimizerNames::write_groups_of(PythonObject optimizer, const std::string& name) {
  const PythonRef dict = reader_.dict_of(optimizer);
  const PythonRef groups = reader_.entry(dict.get(), "param_groups");
  std::unordered_map<PythonObject, uint32_t> group_of;
  size_t index = 0;
  for (const PythonRef& group : reader_.items(groups.get())) {
    const uint32_t id = thread_state().names.name(std::string_view(group_name(name, index++, group.get())));
    const PythonRef members = reader_.entry(group.get(), "params");
    for (const PythonRef& parameter : reader_.items(members.get())) {
      group_of[parameter.get()] = id;
      const c10::TensorImpl* tensor = tensors_.find(parameter.get());
      if (tensor == nullptr) continue;
      write_tensor(*tensor, id, kGroupedParameter | (tensor->requires_grad() ? kGroupedTrained : 0));
      if (tensor->grad().defined()) write_tensor(*tensor->grad().unsafeGetTensorImpl(), id, kGroupedGradient);
    }
  }
  write_states(dict.get(), group_of);
}

void OptimizerNames::write_states(PythonObject optimizer_dict,
                                  const std::unordered_map<PythonObject, uint32_t>& group_of) {
  const PythonRef states = reader_.entry(optimizer_dict, "state");
  for (const auto& [parameter, state] : reader_.pairs(states.get())) {
    const auto group = group_of.find(parameter.get());
    if (group == group_of.end()) continue;
    for (const auto& [key, value] : reader_.pairs(state.get())) write_member(value.get(), group->second);
  }
}

void OptimizerNames::write_member(PythonObject value, uint32_t group) {
  if (const c10::TensorImpl* tensor = tensors_.find(value)) return write_tensor(*tensor, group, kGroupedState);
  for (const PythonRef& item : reader_.items(value)) {
    if (const c10::TensorImpl* tensor = tensors_.find(item.get())) write_tensor(*tensor, group, kGroupedState);
  }
}

std::string OptimizerNames::group_name(const std::string& optimizer, size_t index, PythonObject group) const {
  const std::string name = optimizer + ", group " + std::to_string(index);
  const std::string own = reader_.text(reader_.entry(group, "name").get());
  return own.empty() ? name : name + " (" + own + ")";
}

void OptimizerNames::write_failed(PythonObject optimizer, PythonObject group) {
  const std::string* name = names_.find(optimizer);
  if (name == nullptr) return;
  const PythonRef list = reader_.entry(reader_.dict_of(optimizer).get(), "param_groups");
  const std::vector<PythonRef> groups = reader_.items(list.get());
  for (size_t index = 0; groups.size() > 1 && index < groups.size(); ++index) {
    if (groups[index].get() != group) continue;
    const std::string text = group_name(*name, index, group);
    Event event = group_event(thread_state().names.name(std::string_view(text)));
    session().writer().write(event);
  }
}

}  // namespace oomdiag
