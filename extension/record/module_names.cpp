#include "extension/record/module_names.h"

#include <algorithm>
#include <bit>

#include "extension/python_symbols.h"
#include "extension/record/internal_names.h"
#include "extension/record/python_api.h"
#include "extension/record/session.h"
#include "extension/record/tensor_event.h"
#include "extension/record/thread_state.h"
#include "profiler/event.h"
#include "profiler/trace/mix.h"

// What torch.nn.Module keeps in _modules, _parameters and _buffers is read here as the dictionaries that it is. Its own
// named_modules() and the like are the program's to override, and to interrupt.

namespace oomdiag {

namespace {

constexpr size_t kMaxModules = 1 << 20;

void write_name(EventKind kind, const c10::TensorImpl& tensor, const std::string& path) {
  ThreadState& state = thread_state();
  Event event = state.event(kind);
  if (!locate_storage(tensor, event)) return;
  Context context;
  context.module = state.names.name(std::string_view(path));
  event.detail = state.names.name(describe_shape(tensor.sizes(), c10::typeMetaToScalarType(tensor.dtype())));
  event.context = state.names.context(context);
  session().writer().write_and_keep(event);
}

std::string join(const std::string& path, const std::string& name) { return path.empty() ? name : path + "." + name; }

/// Says in the trace which rank of how many this process is, if torch.distributed knows it: launchers like mp.spawn set no
/// RANK.
void note_rank(const PythonApi& api) {
  const PythonReader reader(api);
  if (!reader.find("torch.distributed.distributed_c10d", "init_process_group")) return;  // not loaded
  const PythonRef world = reader.find("torch.distributed.distributed_c10d", "_world");
  const PythonRef group_type = reader.find("torch._C._distributed_c10d", "ProcessGroup");
  const PythonRef group = world ? reader.entry(reader.dict_of(world.get()).get(), "_default_pg") : PythonRef();
  if (!group || !group_type) return note_missing(InternalName::default_group);
  const PythonRef type(api, api.type(group.get()));
  if (type.get() != group_type.get()) return;  // none yet, or one that is written in Python
  const PythonRef rank = reader.call_builtin(group.get(), "rank");
  const PythonRef size = reader.call_builtin(group.get(), "size");
  if (!rank || !size) return note_missing(InternalName::default_group);
  session().writer().header().rank = static_cast<int>(api.to_long(rank.get()));
  session().writer().header().world_size = static_cast<int>(api.to_long(size.get()));
}

}  // namespace

uint32_t ModuleNames::find(PythonObject module) const {
  const ObjectName* name = names_.find(module);
  return name == nullptr ? 0 : name->id;
}

uint32_t ModuleNames::name_calls(std::span<const PythonRef> calls, const ReadVariables& read_variables) {
  size_t named = 0;
  while (named < calls.size() && find(calls[named].get()) == 0) ++named;
  PythonObject root = calls.back().get();
  if (const ObjectName* known = names_.find(root); known == nullptr) {
    root_is_new_ = true;
    name_tree(root, find_path(root, read_variables));
  } else if (PythonObject caller = calls[named].get(), module = calls[named - 1].get();
             is_worth_a_search(caller, module)) {
    root_is_new_ = false;
    name_tree(root, known->path);
    if (find(module) != 0) count_strangers(caller, module) = 0;
  }
  for (const PythonRef& module : calls) {
    if (const uint32_t id = find(module.get()); id != 0) return id;
  }
  return 0;
}

// Modules that are made in forward are many, and looking for each of them in a large model takes longer than the forward
// pass. Those that one module calls and that are of one type are looked for at the first call, the second, the fourth, …
// after the last one that was found.
bool ModuleNames::is_worth_a_search(PythonObject caller, PythonObject module) {
  return std::has_single_bit(++count_strangers(caller, module));
}

uint32_t& ModuleNames::count_strangers(PythonObject caller, PythonObject module) {
  const PythonRef type(api_, api_.type(module));
  const auto of = [](PythonObject object) { return reinterpret_cast<uint64_t>(object) >> 4; };
  return strangers_[spread(of(caller)) ^ of(type.get())];
}

// Empty of a whole model.
std::string ModuleNames::find_path(PythonObject called, const ReadVariables& read_variables) {
  if (!is_worth_a_search(nullptr, called)) return {};
  std::string path = find_path_in_known(called);
  if (path.empty()) {
    const PythonRef whole = find_whole_model(called, read_variables);
    if (!whole) return {};
    wholes_.add(whole.get(), wholes_found_++);
    path = path_below(whole.get(), called);
  }
  count_strangers(nullptr, called) = 0;  // of models that are made anew all have the same names
  return path;
}

// Python's collector may run meanwhile: they are held.
std::string ModuleNames::find_path_in_known(PythonObject called) {
  std::vector<std::pair<uint32_t, PythonRef>> wholes;
  for (PythonObject whole : wholes_.all()) wholes.emplace_back(*wholes_.find(whole), PythonRef::borrowed(api_, whole));
  std::ranges::sort(wholes, {}, [](const auto& one) { return one.first; });
  for (const auto& [number, whole] : wholes) {
    if (std::string path = path_below(whole.get(), called); !path.empty()) return path;
  }
  return {};
}

// Of variables that have the module below them the outermost one: of a trainer's `self`, not of the model's. A list of modules is none.
PythonRef ModuleNames::find_whole_model(PythonObject called, const ReadVariables& read_variables) {
  const PythonRef attributes = reader_.dict_of(called);
  const bool is_model =
      !registered(attributes.get(), "_modules").empty() || !registered(attributes.get(), "_parameters").empty();
  const PythonRef module_type = reader_.find("torch.nn.modules.module", "Module");
  PythonRef whole;
  if (!is_model || !module_type) return whole;
  std::unordered_set<PythonObject> known{called};
  for (PythonRef& variable : read_variables()) {
    PythonObject outermost = whole ? whole.get() : called;
    const bool is_new = reader_.is_a(variable.get(), module_type.get()) && known.insert(variable.get()).second;
    const std::string type = is_new ? reader_.type_name(variable.get()) : "";
    if (!is_new || type == "ModuleList" || type == "ModuleDict") continue;
    if (!path_below(variable.get(), outermost).empty()) whole = std::move(variable);
  }
  return whole;
}

std::string ModuleNames::path_below(PythonObject module, PythonObject searched) {
  seen_.clear();
  std::string path;
  return extend_path(module, searched, path) ? path : std::string();
}

bool ModuleNames::extend_path(PythonObject module, PythonObject searched, std::string& path) {
  if (module == searched) return true;
  if (seen_.size() > kMaxModules || !seen_.insert(module).second) return false;
  const PythonRef attributes = reader_.dict_of(module);
  return std::ranges::any_of(registered(attributes.get(), "_modules"), [&](const auto& child) {
    const auto& [name, object] = child;
    const bool leads = object.get() != api_.none && extend_path(object.get(), searched, path);
    if (leads) path = path.empty() ? name : join(name, path);
    return leads;
  });
}

void ModuleNames::name_tree(PythonObject root, const std::string& path) {
  if (root_is_new_) note_rank(api_);
  seen_.clear();
  name_below(root, path);
}

void ModuleNames::name_below(PythonObject module, const std::string& path) {
  if (seen_.size() > kMaxModules || !seen_.insert(module).second) return;
  const PythonRef dict = reader_.dict_of(module);
  if (path.empty() && !has_tables(dict.get())) note_missing(InternalName::module_tables);
  const std::string name = path.empty() ? reader_.type_name(module) : path;
  const uint32_t id = session().writer().intern(std::string_view(name));
  const bool is_new = names_.add(module, {path, id});
  if (is_new || root_is_new_) {
    write_tensors(dict.get(), "_parameters", EventKind::parameter, path);
    write_tensors(dict.get(), "_buffers", EventKind::buffer, path);
  }
  for (const auto& [child, object] : registered(dict.get(), "_modules")) {
    if (object.get() != api_.none) name_below(object.get(), join(path, child));
  }
}

bool ModuleNames::has_tables(PythonObject dict) const {
  return reader_.entry(dict, "_modules") && reader_.entry(dict, "_parameters") && reader_.entry(dict, "_buffers");
}

// Scripted modules keep wrappers there: of modules a dict, of tensors an object of C++ that lists them.
std::vector<std::pair<std::string, PythonRef>> ModuleNames::registered(PythonObject dict, const char* which) const {
  const PythonRef own = reader_.entry(dict, which);
  if (!own || reader_.is_a(own.get(), api_.dict_type)) return reader_.entries(own.get());
  const PythonRef wrapper = reader_.dict_of(own.get());
  const PythonRef modules = reader_.entry(wrapper.get(), "_python_modules");
  if (modules) return reader_.entries(modules.get());
  const PythonRef tensors = reader_.entry(wrapper.get(), "_c");
  const PythonRef listed = tensors ? reader_.call_builtin(tensors.get(), "items") : PythonRef();
  std::vector<std::pair<std::string, PythonRef>> result;
  for (const PythonRef& pair : reader_.items(listed.get())) {
    std::vector<PythonRef> both = reader_.items(pair.get());
    if (both.size() == 2) result.emplace_back(reader_.text(both[0].get()), std::move(both[1]));
  }
  return result;
}

void ModuleNames::write_tensors(PythonObject dict, const char* which, EventKind kind, const std::string& path) {
  for (const auto& [name, object] : registered(dict, which)) {
    if (const c10::TensorImpl* tensor = tensors_.find(object.get())) write_name(kind, *tensor, join(path, name));
  }
}

}  // namespace oomdiag
