#include "extension/record/python.h"

#include <ATen/record_function.h>

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "extension/record/control.h"
#include "extension/record/python_api.h"
#include "extension/record/session.h"
#include "extension/record/thread_state.h"
#include "generated/module_names.h"

// Where in the user's program does an op run? The recorder looks at Python's frames when an outermost op starts: the
// innermost frame of the user's own code gives the line, the innermost call of a torch.nn.Module gives the module. Reading
// frames costs a microsecond and changes nothing; module hooks would cost three times that and take torch off its fast path.

namespace oomdiag {

namespace {

constexpr int kMaxFrames = 96;  // a deeper stack is a framework's; its outer frames tell nothing about the op

enum class Code { library, user, module_call, optimizer };

/// A line of the user's program. The code object is held for ever: its address would be used again.
struct Place {
  PythonObject code;
  int instruction;
  bool operator==(const Place&) const = default;
};
struct PlaceHash {
  size_t operator()(const Place& place) const {
    return std::hash<void*>{}(place.code) * 31 + static_cast<size_t>(place.instruction);
  }
};

/// The interpreter and what is known of its program. Guarded by the GIL.
struct Interpreter {
  PythonApi api;
  PythonObject meet_root = nullptr;
  PythonObject meet_optimizer = nullptr;
  PythonObject name_groups = nullptr;
  std::unordered_map<PythonObject, Code> code;
  struct {
    PythonObject code = nullptr;
    Code kind = Code::library;
  } recent_code[512];  ///< a small cache before `code`: a dozen frames are looked at per op
  std::unordered_map<Place, uint32_t, PlaceHash> sources;
  std::unordered_map<PythonObject, uint32_t> modules;  ///< path of each living module, by its id
};
Interpreter* python = nullptr;

Code find_kind(Interpreter& known, PythonObject code) {
  const auto [entry, fresh] = known.code.try_emplace(code, Code::library);
  if (!fresh) return entry->second;
  known.api.incref(code);
  const std::string file = known.api.text(code, "co_filename");
  if (file.ends_with("/torch/nn/modules/module.py")) {
    if (known.api.text(code, "co_name") == "_wrapped_call_impl") entry->second = Code::module_call;
  } else if (file.ends_with("/torch/optim/optimizer.py")) {
    entry->second = Code::optimizer;
  } else if (file.find("/site-packages/") == file.npos && file.find("/dist-packages/") == file.npos &&
             !file.starts_with("<frozen")) {
    entry->second = Code::user;
  }
  return entry->second;
}

Code kind_of(Interpreter& known, PythonObject code) {
  auto& recent = known.recent_code[(reinterpret_cast<uintptr_t>(code) >> 4) % std::size(known.recent_code)];
  if (recent.code != code) recent = {code, find_kind(known, code)};
  return recent.kind;
}

void write_stack(Interpreter& known, uint32_t source);

uint32_t source_of(Interpreter& known, PythonObject code, PythonObject frame) {
  const Place place{code, known.api.frame_instruction(frame)};
  const auto entry = known.sources.find(place);
  if (entry != known.sources.end()) return entry->second;
  const std::string source = known.api.text(code, "co_filename") + ":" + std::to_string(known.api.frame_line(frame));
  const uint32_t id = session().writer().intern(std::string_view(source));
  known.sources.emplace(place, id);
  write_stack(known, id);
  return id;
}

/// The frames of this thread from the innermost outwards. `visit(frame, code)` returns false to stop.
template <class Visit>
void walk_frames(const PythonApi& api, Visit visit) {
  PythonObject frame = api.frame();
  if (frame != nullptr) api.incref(frame);
  bool more = true;
  for (int depth = 0; frame != nullptr; ++depth) {
    PythonObject code = api.frame_code(frame);
    more = more && depth < kMaxFrames && visit(frame, code);
    api.decref(code);
    PythonObject back = more ? api.frame_back(frame) : nullptr;
    api.decref(frame);
    frame = back;
  }
}

// From the user's innermost frame outwards; torch's own frames in between are shortened to "site-packages/torch/…".
std::string stack_text(Interpreter& known) {
  std::string text;
  bool begun = false;
  walk_frames(known.api, [&](PythonObject frame, PythonObject code) {
    begun = begun || kind_of(known, code) == Code::user;
    if (!begun) return true;
    const std::string file = known.api.text(code, "co_filename");
    const size_t package = std::min(file.rfind("/site-packages/"), file.rfind("/dist-packages/"));
    text += (text.empty() ? "" : "\n") + (package == file.npos ? file : file.substr(package + 1));
    text += ":" + std::to_string(known.api.frame_line(frame)) + " in " + known.api.text(code, "co_name");
    return true;
  });
  return text;
}

// What a line's stack was when it was first reached, or with no line that of the refusal before.
void write_stack(Interpreter& known, uint32_t source) {
  const std::string text = stack_text(known);
  if (text.empty()) return;
  Event event = thread_state().event(EventKind::stack);
  event.address = source;
  event.detail = session().writer().intern(std::string_view(text));
  if (source == 0) {
    session().writer().write(event);
  } else {
    session().writer().write_and_keep(event);
  }
}

/// Calls a function of extension/python/module_names.py; the reference to its argument (or null) is taken.
void call(const PythonApi& api, PythonObject function, PythonObject argument) {
  PythonObject arguments = api.tuple(argument == nullptr ? 0 : 1);
  if (argument != nullptr) api.tuple_set(arguments, 0, argument);
  const at::DisableRecordFunctionGuard no_ops;
  PythonObject result = api.call(function, arguments);
  if (result != nullptr) api.decref(result);
  if (api.error() != nullptr) api.clear_error();
  api.decref(arguments);
}

// The outermost module that is being called: the one whose names are the full paths.
void meet_root_module(Interpreter& known) {
  const PythonApi& api = known.api;
  PythonObject root = nullptr;
  walk_frames(api, [&](PythonObject frame, PythonObject code) {
    if (kind_of(known, code) != Code::module_call) return true;
    if (root != nullptr) api.decref(root);
    root = api.self_of(frame);
    return true;
  });
  if (root == nullptr) return;
  call(api, known.meet_root, root);
}

uint32_t path_of(Interpreter& known, PythonObject module) {
  auto entry = known.modules.find(module);
  if (entry == known.modules.end() && known.meet_root != nullptr) {
    meet_root_module(known);
    entry = known.modules.find(module);
    if (entry == known.modules.end())
      entry = known.modules.emplace(module, 0).first;  // not under the root: do not ask again
  }
  return entry == known.modules.end() ? 0 : entry->second;
}

void locate(Interpreter& known, Context& context) {
  PythonObject module = nullptr;
  walk_frames(known.api, [&](PythonObject frame, PythonObject code) {
    const Code kind = kind_of(known, code);
    if (kind == Code::user && context.source == 0) context.source = source_of(known, code, frame);
    if (kind == Code::module_call && module == nullptr) module = known.api.self_of(frame);
    return context.source == 0 || module == nullptr;
  });
  if (module == nullptr) return;
  if (const uint32_t path = path_of(known, module); path != 0) context.module = path;
  known.api.decref(module);
}

// torch.optim's own code has the optimizer as `self`, whatever class it is of.
void meet_running_optimizer(Interpreter& known) {
  PythonObject optimizer = nullptr;
  walk_frames(known.api, [&](PythonObject frame, PythonObject code) {
    const Code kind = kind_of(known, code);
    if (kind == Code::optimizer) optimizer = known.api.self_of(frame);
    return optimizer == nullptr && kind != Code::user;
  });
  if (optimizer == nullptr) return;
  if (known.modules.contains(optimizer)) return known.api.decref(optimizer);
  call(known.api, known.meet_optimizer, optimizer);
}

// In a module of its own: PyRun_SimpleString would write into the user's __main__.
void load_module_names(Interpreter& known) {
  PythonApi& api = known.api;
  api.self_name = api.intern("self");
  PythonObject module = api.add_module("_oomdiag_module_names");
  PythonObject builtins = api.import("builtins");
  if (module == nullptr || builtins == nullptr) return api.clear_error();
  PythonObject globals = api.module_dict(module);
  api.dict_set(globals, "__builtins__", builtins);
  api.decref(builtins);
  constexpr int kFileInput = 257;  // Py_file_input
  PythonObject result = api.run(kModuleNames, kFileInput, globals, globals);
  if (result == nullptr) return api.clear_error();  // the program runs on, without module paths
  api.decref(result);
  known.meet_root = api.dict_get(globals, "meet_root");
  known.meet_optimizer = api.dict_get(globals, "meet_optimizer");
  known.name_groups = api.dict_get(globals, "name_groups");
  for (PythonObject function : {known.meet_root, known.meet_optimizer, known.name_groups}) api.incref(function);
}

}  // namespace

void attach_python() noexcept try {
  if (python != nullptr) return;
  auto interpreter = std::make_unique<Interpreter>();
  if (!interpreter->api.load() || interpreter->api.this_thread() == nullptr) return;
  python = interpreter.release();  // never destroyed: used until the process ends
  const GilScope gil;
  if (gil.held() && python->api.error() == nullptr) load_module_names(*python);
} catch (...) {
}

bool python_attached() noexcept { return python != nullptr; }

GilScope::GilScope() noexcept {
  if (python == nullptr) return;
  const PythonApi& api = python->api;
  if (api.is_initialized() == 0 || (api.is_finalizing != nullptr && api.is_finalizing() != 0)) return;
  if (api.this_thread() == nullptr) return;
  held_ = true;
  if (api.check() != 0) return;
  state_ = api.ensure();
  release_ = true;
}

GilScope::~GilScope() {
  if (release_) python->api.release(state_);
}

void locate_in_python(Context& context) noexcept try {
  if (python == nullptr) return;
  const GilScope gil;
  if (gil.held() && python->api.error() == nullptr) locate(*python, context);
} catch (...) {
}

void write_python_stack() noexcept try {
  if (python == nullptr) return;
  const GilScope gil;
  if (gil.held() && python->api.error() == nullptr) write_stack(*python, 0);
} catch (...) {
}

void meet_optimizer() noexcept try {
  if (python == nullptr) return;
  const GilScope gil;
  const bool can_ask = gil.held() && python->api.error() == nullptr && python->meet_optimizer != nullptr;
  if (can_ask) meet_running_optimizer(*python);
} catch (...) {
}

void write_parameter_groups(bool refused) noexcept try {
  if (python == nullptr) return;
  const GilScope gil;
  if (!gil.held() || python->api.error() != nullptr || python->name_groups == nullptr) return;
  call(python->api, python->name_groups, refused ? python->api.intern("refused") : nullptr);
} catch (...) {
}

}  // namespace oomdiag

/// Called by extension/python/module_names.py, with the GIL: the path of a module, or null when it has died.
OOMDIAG_EXPORT void oomdiag_name_module(void* module, const char* path) {
  using namespace oomdiag;
  if (path == nullptr) {
    python->modules.erase(module);
  } else if (recording()) {
    python->modules[module] = session().writer().intern(std::string_view(path));
  }
}

/// Called by the same for each parameter and buffer of a root module: the address and size of its storage.
OOMDIAG_EXPORT void oomdiag_name_module_tensor(int is_buffer, uint64_t address, int64_t bytes, int device,
                                               const char* path, const char* shape) {
  using namespace oomdiag;
  if (!recording()) return;
  ThreadState& state = thread_state();
  Context context;
  context.module = state.names.name(std::string_view(path));
  Event event = state.event(is_buffer != 0 ? EventKind::buffer : EventKind::parameter);
  event.address = address;
  event.bytes = bytes;
  event.device = static_cast<uint8_t>(device);
  event.detail = state.names.name(std::string_view(shape));
  event.context = state.names.context(context);
  session().writer().write_and_keep(event);
}

/// Called by the same for what belongs to a parameter group; address 0: the refusal on this thread was for that group.
OOMDIAG_EXPORT void oomdiag_name_group(uint64_t address, int64_t bytes, int device, const char* group) {
  using namespace oomdiag;
  if (!recording()) return;
  ThreadState& state = thread_state();
  Event event = state.event(EventKind::grouped);
  event.address = address;
  event.bytes = bytes;
  event.device = static_cast<uint8_t>(device);
  event.detail = state.names.name(std::string_view(group));
  session().writer().write(event);
}
