#include "extension/record/python.h"

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "extension/record/module_names.h"
#include "extension/record/optimizer_names.h"
#include "extension/record/python_api.h"
#include "extension/record/session.h"
#include "extension/record/thread_state.h"

// Where in the user's program does an op run? The recorder looks at Python's frames when an outermost op starts: the
// innermost frame of the user's own code gives the line, the innermost call of a torch.nn.Module gives the module. Reading
// frames costs a microsecond and changes nothing; module hooks would cost three times that and take torch off its fast path.

namespace oomdiag {

namespace {

constexpr int kMaxFrames = 96;  // a deeper stack is a framework's; its outer frames tell nothing about the op

/// Whose code it is. Torch's own and Python's standard library are nobody's line; a package's is the line where the user's
/// own calls it from far away, as through a trainer.
enum class Code { nobody, package, user, module_call, optimizer };

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
  ModuleNames modules{api};
  OptimizerNames optimizers{api};
  std::unordered_map<PythonObject, Code> code;
  struct {
    PythonObject code = nullptr;
    Code kind = Code::nobody;
  } recent_code[512];  ///< a small cache before `code`: a dozen frames are looked at per op
  std::unordered_map<Place, uint32_t, PlaceHash> sources;
};
Interpreter* python = nullptr;

/// Where the path inside of the installed packages begins; npos of what is not installed.
size_t find_package(std::string_view file) {
  const size_t folder = std::min(file.rfind("/site-packages/"), file.rfind("/dist-packages/"));
  return folder == file.npos ? file.npos : folder + std::string_view("/site-packages/").size();
}

/// "/usr/lib/python3.11/copy.py", "<frozen runpy>".
bool is_standard_library(std::string_view file) {
  constexpr std::string_view kFolder = "/lib/python3.";
  const size_t folder = file.find(kFolder);
  if (folder == file.npos) return file.starts_with("<frozen");
  const size_t end = file.find_first_not_of("0123456789t", folder + kFolder.size());
  return end != file.npos && end > folder + kFolder.size() && file[end] == '/';
}

Code find_kind(Interpreter& known, PythonObject code) {
  const auto [entry, fresh] = known.code.try_emplace(code, Code::nobody);
  if (!fresh) return entry->second;
  known.api.incref(code);
  const std::string file = known.api.text(code, "co_filename");
  if (file.ends_with("/torch/nn/modules/module.py")) {
    if (known.api.text(code, "co_name") == "_wrapped_call_impl") entry->second = Code::module_call;
  } else if (file.ends_with("/torch/optim/optimizer.py")) {
    entry->second = Code::optimizer;
  } else if (const size_t package = find_package(file); package != file.npos) {
    if (file.compare(package, 6, "torch/") != 0) entry->second = Code::package;
  } else if (!is_standard_library(file)) {
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
  std::string source = known.api.text(code, "co_filename") + ":" + std::to_string(known.api.frame_line(frame));
  const bool is_package = kind_of(known, code) == Code::package;
  if (is_package) source.erase(0, find_package(source));
  const uint32_t id = session().writer().intern(std::string_view(source));
  known.sources.emplace(place, id);
  if (!is_package) write_stack(known, id);
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

// From the user's innermost frame outwards, or from the innermost one outside of torch; those of packages in between are
// shortened to "site-packages/torch/…".
std::string stack_text(Interpreter& known, bool with_packages) {
  std::string text;
  bool begun = false;
  walk_frames(known.api, [&](PythonObject frame, PythonObject code) {
    const Code kind = kind_of(known, code);
    begun = begun || kind == Code::user || (with_packages && kind == Code::package);
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
  const std::string text = stack_text(known, source == 0);
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

// All modules that are being called.
uint32_t name_calls(Interpreter& known) {
  std::vector<PythonRef> calls;
  walk_frames(known.api, [&](PythonObject frame, PythonObject code) {
    if (kind_of(known, code) != Code::module_call) return true;
    if (PythonObject self = known.api.self_of(frame); self != nullptr) calls.emplace_back(known.api, self);
    return true;
  });
  return calls.empty() ? 0 : known.modules.name_calls(calls);
}

void locate(Interpreter& known, Context& context) {
  PythonObject module = nullptr;
  walk_frames(known.api, [&](PythonObject frame, PythonObject code) {
    const Code kind = kind_of(known, code);
    if (kind == Code::user && context.source == 0) context.source = source_of(known, code, frame);
    if (kind == Code::package && context.source == 0 && context.inner_source == 0) {
      context.inner_source = source_of(known, code, frame);
    }
    if (kind == Code::module_call && module == nullptr) module = known.api.self_of(frame);
    return context.source == 0 || module == nullptr;
  });
  const PythonRef held(known.api, module);
  if (module == nullptr) return;
  uint32_t path = known.modules.find(module);
  if (path == 0) [[unlikely]]
    path = name_calls(known);
  if (path != 0) context.module = path;
}

// torch.optim's own code has the optimizer as `self`, whatever class it is of.
void meet_running_optimizer(Interpreter& known) {
  PythonObject optimizer = nullptr;
  walk_frames(known.api, [&](PythonObject frame, PythonObject code) {
    const Code kind = kind_of(known, code);
    if (kind == Code::optimizer) optimizer = known.api.self_of(frame);
    return optimizer == nullptr && kind != Code::user;
  });
  const PythonRef held(known.api, optimizer);
  if (optimizer != nullptr) known.optimizers.meet(optimizer);
}

// Every torch.optim optimizer goes through its groups by `for group in self.param_groups`.
void write_refused_group(Interpreter& known) {
  const PythonApi& api = known.api;
  const PythonReader reader(api);
  const PythonRef group_name(api, api.intern("group"));
  walk_frames(api, [&](PythonObject frame, PythonObject code) {
    bool has_group = false;
    const PythonRef names(api, api.attribute(code, "co_varnames"));
    for (const PythonRef& name : reader.items(names.get())) has_group |= name.get() == group_name.get();
    if (!has_group) return true;
    const PythonRef group(api, api.variable_of(frame, "group", group_name.get()));
    const PythonRef optimizer(api, api.self_of(frame));
    if (group && optimizer) known.optimizers.write_refused(optimizer.get(), group.get());
    return true;
  });
}

}  // namespace

void attach_python() noexcept try {
  if (python != nullptr) return;
  auto interpreter = std::make_unique<Interpreter>();
  if (!interpreter->api.load() || interpreter->api.this_thread() == nullptr) return;
  python = interpreter.release();  // never destroyed: used until the process ends
  const GilScope gil;
  if (gil.held()) python->api.self_name = python->api.intern("self");
} catch (...) {
}

bool python_attached() noexcept { return python != nullptr; }

bool python_raises() noexcept {
  if (python == nullptr || python->api.is_initialized() == 0 || python->api.this_thread() == nullptr) return false;
  return python->api.holds_gil() && python->api.error() != nullptr;
}

GilScope::GilScope() noexcept {
  if (python == nullptr) return;
  const PythonApi& api = python->api;
  if (api.is_initialized() == 0 || (api.is_finalizing != nullptr && api.is_finalizing() != 0)) return;
  if (api.this_thread() == nullptr || api.has_subinterpreters()) return;
  held_ = true;
  if (api.holds_gil()) return;
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
  if (gil.held() && python->api.error() == nullptr) meet_running_optimizer(*python);
} catch (...) {
}

void write_parameter_groups(bool refused) noexcept try {
  if (python == nullptr) return;
  const GilScope gil;
  if (!gil.held() || python->api.error() != nullptr) return;
  if (refused) python->optimizers.search();
  if (refused) write_refused_group(*python);
  python->optimizers.write_groups();
} catch (...) {
}

}  // namespace oomdiag
