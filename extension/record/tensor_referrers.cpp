#include "extension/record/tensor_referrers.h"

#include <c10/core/TensorImpl.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>

#include "extension/python_symbols.h"
#include "extension/record/padding.h"
#include "extension/record/program_code.h"
#include "extension/record/session.h"
#include "extension/record/tensor_event.h"
#include "extension/record/thread_state.h"
#include "profiler/event.h"
#include "profiler/trace/referrer_words.h"

namespace oomdiag {

namespace {

using Visit = int (*)(PythonObject, void*);
using Traverse = int (*)(PythonObject, Visit, void*);

constexpr int kMaxItemsSearched = 10000;  ///< of a container, for how it calls one of them
constexpr size_t kMaxNameLength = 120;
constexpr size_t kMaxSteps = 64;  ///< of a way that are named: a linked list may have any number
constexpr const char* kNoKey = "…";

std::string base_name(const std::string& file) { return file.substr(file.rfind('/') + 1); }

/// Its name in the trace.
uint32_t name_shape(const c10::TensorImpl& tensor) {
  return thread_state().names.name(describe_shape(tensor.sizes(), c10::typeMetaToScalarType(tensor.dtype())));
}

/// Of what is on no GPU. How many were written.
size_t write_for_each_device(Event event) {
  for (uint32_t device = 0; device < session().device_count; ++device) {
    event.device = static_cast<uint8_t>(device);
    session().writer().write(event);
  }
  return session().device_count;
}

const torch::autograd::Node* grad_fn_of(const c10::TensorImpl& tensor) {
  const c10::AutogradMetaInterface* meta = tensor.autograd_meta();
  return meta == nullptr ? nullptr : static_cast<const torch::autograd::AutogradMeta*>(meta)->grad_fn_.get();
}

}  // namespace

void TensorReferrers::write() {
  if (api_.type_slot == nullptr || api_.is_tracked == nullptr) return;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kMaxMilliseconds);
  write_mark(0);
  add_modules();
  add_traceback();
  if (write_reached(0, end)) {
    const auto next = static_cast<uint32_t>(reached_.size());
    for (const PythonRef& frame : comprehensions_) add_frame(frame.get());
    for (const PythonRef& frame : of_packages_) add_containers(frame.get());
    write_reached(next, end);
  }
  if (is_cut_) write_mark(kSearchCutShort);
}

bool TensorReferrers::write_reached(uint32_t index, std::chrono::steady_clock::time_point end) {
  for (; index < reached_.size(); ++index) {
    if (written_ >= kMaxEvents || std::chrono::steady_clock::now() > end) {
      is_cut_ = true;
      return false;
    }
    write_tensor(index);
    follow(index);
  }
  return true;
}

// No variable refers to what was freed before the first one.
void TensorReferrers::write_mark(uint16_t flags) {
  Event event = thread_state().event(EventKind::referrer);
  event.flags = flags;
  write_for_each_device(event);
}

// Modules refer to all that is loaded, so they are no way to a tensor: only variables of the user's own are.
void TensorReferrers::add_modules() {
  const auto modules = reader_.entries(api_.modules());
  for (const auto& [name, module] : modules) {
    seen_.insert(module.get());
    seen_.insert(reader_.dict_of(module.get()).get());
  }
  for (const bool hidden : {false, true}) {  // IPython has names such as _4 for what Out[4] is
    for (const auto& [name, module] : modules) {
      const PythonRef dict = reader_.dict_of(module.get());
      const bool is_main = name == "__main__";
      const std::string file = is_main ? program() : reader_.text(reader_.entry(dict.get(), "__file__").get());
      if (!is_main && (file.empty() || !code_.is_users_file(file))) continue;
      const std::string place = file.empty() ? name : base_name(file);
      for (const auto& [variable, value] : reader_.entries(dict.get())) {
        if (variable.starts_with('_') == hidden) add_variable(variable, place, value.get());
      }
    }
  }
}

// A script's __main__ has no __file__ any more once it has run.
std::string TensorReferrers::program() const {
  const std::vector<PythonRef> arguments = reader_.items(reader_.find("sys", "argv").get());
  const std::string program = arguments.empty() ? "" : reader_.text(arguments.front().get());
  return program.starts_with('-') ? "" : program;
}

// The interpreter keeps the traceback of the exception that ended the program.
void TensorReferrers::add_traceback() {
  // What lines of the user's called: the first frame of a package, and the file of the line.
  std::vector<std::pair<PythonRef, std::string>> called;
  std::string users_file;
  PythonRef traceback = reader_.find("sys", "last_traceback");
  while (traceback && traceback.get() != api_.none) {
    PythonRef frame = reader_.attribute(traceback.get(), "tb_frame");
    traceback = reader_.attribute(traceback.get(), "tb_next");
    if (!frame) continue;
    const PythonRef code(api_, api_.frame_code(frame.get()));
    if (code_.kind_of(code.get()) != Code::user) {
      of_packages_.push_back(PythonRef::borrowed(api_, frame.get()));
      if (!users_file.empty()) called.emplace_back(std::move(frame), std::exchange(users_file, {}));
      continue;
    }
    users_file = base_name(api_.text(code.get(), "co_filename"));
    if (is_comprehension(frame.get())) {
      comprehensions_.push_back(std::move(frame));
    } else {
      add_frame(frame.get());
    }
  }
  for (const auto& [frame, file] : called) add_called_module(frame.get(), file);
}

// As in Net().cuda(): no variable of the program leads to the model before the line is over.
void TensorReferrers::add_called_module(PythonObject frame, const std::string& file) {
  const PythonRef self(api_, api_.self_of(frame));
  if (!self) return;
  const PythonRef layers = reader_.entry(reader_.dict_of(self.get()).get(), "_modules");
  if (reader_.is_a(layers.get(), api_.dict_type)) add_variable(reader_.type_name(self.get()), file, self.get());
}

// "<listcomp>", "<genexpr>" and the like: its variables are passing names of what the function around it has.
bool TensorReferrers::is_comprehension(PythonObject frame) const {
  const PythonRef code(api_, api_.frame_code(frame));
  const std::string function = api_.text(code.get(), "co_name");
  return function.starts_with('<') && function != "<lambda>" && function != "<module>";
}

// "main (train.py:17)", of a function that begins there.
std::string TensorReferrers::place_of_function(PythonObject code, const std::string& file) const {
  const PythonRef line(api_, api_.attribute(code, "co_firstlineno"));
  return api_.text(code, "co_name") + " (" + file + ":" + std::to_string(reader_.integer(line.get()).value_or(0)) + ")";
}

void TensorReferrers::add_frame(PythonObject frame) {
  const PythonRef code(api_, api_.frame_code(frame));
  if (api_.text(code.get(), "co_name") == "<module>" || code_.kind_of(code.get()) != Code::user) return;
  const std::string place = place_of_function(code.get(), base_name(api_.text(code.get(), "co_filename")));
  for (const auto& [name, value] : variables_of(frame)) add_variable(name, place, value.get());
}

// What a package's function was collecting, as torch.autograd.functional.jacobian() does the rows: "jacobian (torch/autograd/functional.py:9)".
void TensorReferrers::add_containers(PythonObject frame) {
  const PythonRef code(api_, api_.frame_code(frame));
  const std::string file = api_.text(code.get(), "co_filename");
  const size_t package = find_package(file);
  if (package == file.npos || code_.kind_of(code.get()) == Code::module_call) return;
  const std::string place = place_of_function(code.get(), file.substr(package));
  for (const auto& [name, value] : variables_of(frame)) {
    const bool is_container = reader_.is_a(value.get(), api_.list_type) || reader_.is_a(value.get(), api_.dict_type);
    if (is_container && name != "kwargs") add_variable(name, place, value.get());
  }
}

// Of a function that has been left; so nobody else changes them.
std::vector<std::pair<std::string, PythonRef>> TensorReferrers::variables_of(PythonObject frame) const {
  std::vector<std::pair<std::string, PythonRef>> variables;
  const PythonRef code(api_, api_.frame_code(frame));
  for (const char* const names : {"co_varnames", "co_cellvars", "co_freevars"}) {
    const PythonRef tuple(api_, api_.attribute(code.get(), names));
    for (const PythonRef& name : reader_.items(tuple.get())) {
      const std::string text = reader_.text(name.get());
      PythonRef value(api_, api_.variable_of(frame, text.c_str(), name.get()));
      if (value) variables.emplace_back(text, std::move(value));
    }
  }
  return variables;
}

void TensorReferrers::add_variable(const std::string& name, const std::string& place, PythonObject value) {
  variables_.push_back({name, place});
  reach(value, kNone, static_cast<uint32_t>(variables_.size() - 1));
}

void TensorReferrers::reach(PythonObject object, uint32_t parent, uint32_t root) {
  if (object == nullptr || api_.is_tracked(object) == 0 || !seen_.insert(object).second) return;
  reached_.push_back({object, parent, root});
}

int TensorReferrers::visit(PythonObject object, void* search) {
  auto& mine = *static_cast<TensorReferrers*>(search);
  if (++mine.items_ > kMaxItems || mine.reached_.size() >= kMaxObjects) {
    mine.is_cut_ = true;
    return 1;  // ends the traversal
  }
  mine.reach(object, mine.followed_, mine.reached_[mine.followed_].root);
  return 0;
}

void TensorReferrers::follow(uint32_t index) {
  const PythonObject object = reached_[index].object;
  const PythonRef type(api_, api_.type(object));
  const auto [known, is_new] = traverse_.try_emplace(type.get());
  constexpr int kTraverse = 71;  // Py_tp_traverse
  if (is_new) known->second = api_.type_slot(type.get(), kTraverse);
  if (api_.error() != nullptr) api_.clear_error();
  followed_ = index;
  items_ = 0;
  if (known->second != nullptr) reinterpret_cast<Traverse>(known->second)(object, visit, this);
}

void TensorReferrers::write_tensor(uint32_t index) {
  const c10::TensorImpl* tensor = tensors_.find(reached_[index].object);
  Event event = thread_state().event(EventKind::referrer);
  if (tensor == nullptr) return;
  write_padding(*tensor, index);
  if (!locate_storage(*tensor, event)) return write_without_storage(*tensor, index);
  const bool has_own_sizes = !tensor->is_python_dispatch();  // others ask Python code of the program
  if (has_own_sizes) {
    event.bytes = static_cast<int64_t>(tensor->numel() * tensor->itemsize());
    event.node_sequence = name_shape(*tensor);
  }
  const Nodes nodes = count_nodes(grad_fn_of(*tensor));
  event.call_id = nodes.count;
  const std::string name = name_of(index);
  const bool is_parameter =
      reader_.type_name(reached_[index].object) == "Parameter" || name.find("._parameters") != name.npos;
  const bool is_computed = grad_fn_of(*tensor) != nullptr;  // weights of an inner step stand where parameters do
  const bool wants_gradient = tensor->requires_grad() && !is_computed;
  const int parameter = is_parameter && !is_computed ? kIsParameter : 0;
  const int wants = wants_gradient && !is_parameter ? kWantsGradient : 0;
  event.flags = static_cast<uint16_t>(nodes.flags | parameter | wants);
  event.detail = thread_state().names.name(std::string_view(name));
  session().writer().write(event);
  ++written_;
  if (wants_gradient && !is_parameter) write_gradient(*tensor, name);
}

// Of data: autograd alone refers to it, which no way from a variable goes through.
void TensorReferrers::write_gradient(const c10::TensorImpl& tensor, const std::string& name) {
  const at::Tensor& gradient = tensor.grad();
  Event event = thread_state().event(EventKind::referrer);
  if (!gradient.defined() || !locate_storage(*gradient.unsafeGetTensorImpl(), event)) return;
  const size_t begin = name.find(" '"), end = name.rfind("' in ");  // of the path, which a container's items share
  if (begin == name.npos || end == name.npos) return;
  const bool is_of_tensor = name.starts_with("variable ") || name.starts_with("attribute ");
  const std::string path = name.substr(begin, end - begin) + (is_of_tensor ? ".grad" : "[*].grad");
  const bool has_own_sizes =
      !gradient.unsafeGetTensorImpl()->is_python_dispatch();  // others ask Python code of the program
  if (has_own_sizes) event.bytes = static_cast<int64_t>(gradient.nbytes());
  event.detail = thread_state().names.name(std::string_view("attribute" + path + name.substr(end)));
  session().writer().write(event);
  ++written_;
}

// A result that was copied to the host keeps the graph of the GPU: no storage there, but nodes; so does one of no elements. A large one may
// be what is copied to the GPU as memory runs out.
void TensorReferrers::write_without_storage(const c10::TensorImpl& tensor, uint32_t index) {
  constexpr int64_t kLarge = int64_t{1} << 24;
  const torch::autograd::Node* const root = grad_fn_of(tensor);
  if (!tensor.is_cpu() && root == nullptr) return;
  const bool has_own_sizes = !tensor.is_python_dispatch();
  const auto bytes = has_own_sizes ? static_cast<int64_t>(tensor.numel() * tensor.itemsize()) : 0;
  if (root == nullptr && bytes < kLarge) return;
  const Nodes nodes = count_nodes(root);
  Event event = thread_state().event(EventKind::referrer);
  event.call_id = nodes.count;
  event.flags = nodes.flags;
  event.detail = thread_state().names.name(std::string_view(name_of(index)));
  event.bytes = bytes;
  written_ += write_for_each_device(event);
}

// Of a batch of texts or recordings.
void TensorReferrers::write_padding(const c10::TensorImpl& tensor, uint32_t index) {
  if (looked_inside_ > std::chrono::milliseconds(kMaxMillisecondsInside)) return;
  const auto begin = std::chrono::steady_clock::now();
  const std::optional<Padding> padding = look_inside(tensor);
  looked_inside_ += std::chrono::steady_clock::now() - begin;
  if (!padding) return;
  Event event = thread_state().event(EventKind::referrer);
  event.flags = kPadded;
  event.bytes = padding->longest;
  event.call_id = static_cast<uint32_t>(padding->per_mille);
  event.node_sequence = name_shape(tensor);
  event.detail = thread_state().names.name(std::string_view(name_of(index)));
  written_ += write_for_each_device(event);
}

// What lies on a GPU is read where that is a virtual one, as far as it keeps what the host wrote: no work of a real one is waited for.
std::optional<Padding> TensorReferrers::look_inside(const c10::TensorImpl& tensor) {
  constexpr size_t kMaxBytes = size_t{32} << 20;
  using Peek = bool (*)(void*, const void*, size_t);
  static const auto peek = reinterpret_cast<Peek>(dlsym(RTLD_DEFAULT, "oomdiag_device_peek"));
  const bool is_readable = tensor.is_cpu() || (tensor.is_cuda() && peek != nullptr);
  if (!is_readable || tensor.is_python_dispatch() || tensor.requires_grad() || !tensor.has_storage()) return {};
  if (tensor.dim() < 2 || !tensor.is_contiguous() || tensor.data() == nullptr) return {};
  const size_t bytes = static_cast<size_t>(tensor.numel()) * tensor.itemsize();
  if (bytes == 0 || bytes > kMaxBytes) return {};
  std::vector<std::byte> copy(tensor.is_cpu() ? 0 : bytes);
  if (!tensor.is_cpu() && !peek(copy.data(), tensor.data(), bytes)) return {};
  const auto* const data = tensor.is_cpu() ? static_cast<const std::byte*>(tensor.data()) : copy.data();
  return find_padding(data, tensor.itemsize(), {tensor.sizes().data(), tensor.sizes().size()});
}

// That this tensor keeps and no tensor before it did; of a tensor in a graph at least its own.
TensorReferrers::Nodes TensorReferrers::count_nodes(const torch::autograd::Node* root) {
  if (root == nullptr) return {};
  const size_t before = nodes_.size();
  bool are_of_newest_steps = true;
  std::vector<const torch::autograd::Node*> waiting{root};
  while (!waiting.empty() && nodes_.size() < kMaxNodes) {
    const torch::autograd::Node* node = waiting.back();
    waiting.pop_back();
    if (node == nullptr || !nodes_.insert(node).second) continue;
    const bool accumulates = node->sequence_nr() == UINT64_MAX;  // a gradient, in whatever step it was made
    are_of_newest_steps &= accumulates || session().steps().is_of_newest_steps(node->sequence_nr(), node->thread_id());
    for (const auto& edge : node->next_edges()) waiting.push_back(edge.function.get());
  }
  const size_t found = nodes_.size() - before;
  return {.count = static_cast<uint32_t>(std::max<size_t>(1, found)),
          .flags = static_cast<uint16_t>(are_of_newest_steps ? kOfNewestSteps : 0)};
}

// From the tensor towards the variable, which a long way does not come to.
std::vector<uint32_t> TensorReferrers::way_to(uint32_t index) const {
  std::vector<uint32_t> way;
  for (uint32_t at = index; at != kNone && way.size() <= kMaxSteps; at = reached_[at].parent) way.push_back(at);
  return way;
}

// From the variable to the tensor; what is only an item of a container is called by that.
std::string TensorReferrers::name_of(uint32_t index) const {
  const std::vector<uint32_t> way = way_to(index);
  const bool is_whole = reached_[way.back()].parent == kNone;
  const Variable& variable = variables_[reached_[index].root];
  std::string path = is_whole ? variable.name : variable.name + kNoKey;
  std::string place = variable.place, named = path;
  uint32_t holder = way.back();
  bool is_in_function = false;  // of the holder
  for (size_t i = way.size() - 1; i-- > 0;) {
    const PythonObject parent = reached_[way[i + 1]].object;
    const std::string type = reader_.type_name(parent);
    if (type == "_lru_cache_wrapper") return std::string(kCacheOfResults) + "'" + named + "' in " + place;
    const std::string step = name_of_step(way[i]);
    const bool is_of_frame = type == "frame";
    if (is_of_frame) {
      const PythonRef code(api_, api_.frame_code(parent));
      place = api_.text(code.get(), "co_name") + "(), " + std::string(kFrameOfTraceback) + "'" + named + "'" +
              std::string(kKeepsFrame);
      path = step.empty() ? "?" : step.substr(1);
    } else {
      path += step;
    }
    const bool is_item = step.empty() || step.starts_with('[');
    is_in_function = is_in_function || is_function(parent);
    if (is_item && !is_of_frame && variable.name != "Out") continue;
    named = path;
    holder = way[i];
    is_in_function = false;
  }
  const bool is_tensor = holder == index;
  const std::string kind = !is_tensor                      ? reader_.type_name(reached_[holder].object)
                           : named.find('.') != named.npos ? "attribute"
                                                           : "variable";
  if (named.size() > kMaxNameLength) {  // the beginning is the program's own name for it; whole steps go
    const size_t end = named.find_last_of(".[", kMaxNameLength / 2);
    const size_t begin = named.find_first_of(".[", named.size() - kMaxNameLength / 2);
    if (end != named.npos && begin != named.npos) named = named.substr(0, end) + "…" + named.substr(begin);
  }
  return kind + std::string(is_in_function ? kOfFunctions : "") + " '" + named + "' in " + place;
}

bool TensorReferrers::is_function(PythonObject object) const {
  const std::string type = reader_.type_name(object);
  return type == "function" || type == "method" || type == "partial";
}

namespace {

/// ["loss"], as the program writes it; [3] of a number, also of one that is a text, as names of modules in a list are.
std::string subscript(const std::string& key) {
  const bool is_plain = key == kNoKey || key.find_first_not_of("-0123456789") == key.npos;
  return is_plain ? "[" + key + "]" : "[\"" + key + "\"]";
}

}  // namespace

// How the object is called by the one that refers to it: ".cache", "[3]", "["loss"]", or empty.
std::string TensorReferrers::name_of_step(uint32_t index) const {
  const uint32_t parent = reached_[index].parent;
  const PythonObject container = reached_[parent].object, item = reached_[index].object;
  if (reader_.is_a(container, api_.dict_type)) {
    const uint32_t owner = reached_[parent].parent;
    const bool is_attributes = owner != kNone && reader_.dict_of(reached_[owner].object).get() == container;
    const std::string key = key_of(container, item);
    return is_attributes ? "." + key : subscript(key);
  }
  if (reader_.is_a(container, api_.list_type) || reader_.is_a(container, api_.tuple_type)) {
    const bool is_list = reader_.is_a(container, api_.list_type);
    const intptr_t count = is_list ? api_.list_size(container) : api_.tuple_size(container);
    for (intptr_t i = 0; i < count && i < kMaxItemsSearched; ++i) {
      const PythonObject at = is_list ? api_.list_get(container, i) : api_.tuple_get(container, i);
      if (at == item) return "[" + std::to_string(i) + "]";
    }
    return "[…]";
  }
  if (reader_.type_name(container) == "frame") return variable_of(container, item);
  const PythonRef attributes = reader_.dict_of(container);  // made for the question where they lie in the object itself
  if (attributes.get() == item || !reader_.is_a(attributes.get(), api_.dict_type)) return {};
  const std::string key = key_of(attributes.get(), item);
  return key == kNoKey ? "" : "." + key;
}

std::string TensorReferrers::key_of(PythonObject container, PythonObject item) const {
  intptr_t place = 0;
  PythonObject key = nullptr;
  PythonObject value = nullptr;
  for (int i = 0; i < kMaxItemsSearched && api_.dict_next(container, &place, &key, &value) != 0; ++i) {
    if (value != item) continue;
    if (reader_.is_a(key, api_.text_type)) return reader_.text(key);
    const std::optional<long> number = reader_.integer(key);
    return number ? std::to_string(*number) : kNoKey;
  }
  return kNoKey;
}

// ".x" of the local variable x, or empty.
std::string TensorReferrers::variable_of(PythonObject frame, PythonObject value) const {
  for (const auto& [name, variable] : variables_of(frame)) {
    if (variable.get() == value) return "." + name;
  }
  return {};
}

}  // namespace oomdiag
