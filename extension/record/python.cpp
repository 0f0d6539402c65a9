#include "extension/record/python.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "extension/interpreter_shutdown.h"
#include "extension/python_symbols.h"
#include "extension/record/gil.h"
#include "extension/record/module_names.h"
#include "extension/record/optimizer_names.h"
#include "extension/record/program_code.h"
#include "extension/record/python_api.h"
#include "extension/record/python_frames.h"
#include "extension/record/session.h"
#include "extension/record/tensor_referrers.h"
#include "extension/record/thread_state.h"
#include "profiler/event.h"
#include "profiler/package_paths.h"
#include "profiler/trace/mix.h"

// Where in the user's program does an op run? The recorder looks at Python's frames when an outermost op starts: the
// innermost frame of the user's own code gives the line, the innermost call of a torch.nn.Module gives the module. Reading
// frames costs a microsecond, a tenth of that where the thread came by before, and changes nothing; module hooks would cost
// three times that and take torch off its fast path.

namespace oomdiag {

namespace {

/// A line of the user's program.
struct Place {
  PythonObject code;
  int instruction;
};

/// The interpreter and what is known of its program. Guarded by the GIL, but for what is measured once and what is atomic.
struct Interpreter {
  PythonApi api;
  PythonFrames frames;
  ProgramCode code{api};
  ModuleNames modules{api};
  OptimizerNames optimizers{api};
};
Interpreter* python = nullptr;

/// A line of a program, and the calls that led to it.
struct Line {
  PythonObject code;
  int number;
};
std::string text_of(Interpreter& known, const std::vector<Line>& calls, bool with_packages);
void write_stack(const std::string& text, uint32_t source, uint16_t flags = 0);

/// `read_calls()` gives the calls that run, the innermost first; it is asked where a line is seen for the first time.
template <class ReadCalls>
uint32_t source_of(Interpreter& known, const Place& place, int line, ReadCalls read_calls) {
  KnownCode* const code = known.code.find(place.code);
  if (code != nullptr) {
    if (const auto entry = code->sources.find(place.instruction); entry != code->sources.end()) return entry->second;
  }
  std::string source = known.api.text(place.code, "co_filename") + ":" + std::to_string(line);
  const bool is_package = known.code.kind_of(place.code) == Code::package;
  if (is_package) source.erase(0, find_package(source));
  const uint32_t id = session().writer().intern(std::string_view(source));
  if (code != nullptr) code->sources.emplace(place.instruction, id);
  if (!is_package) write_stack(text_of(known, read_calls(), false), id);
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
    more = more && depth < PythonFrames::kMax && visit(frame, code);
    api.decref(code);
    PythonObject back = more ? api.frame_back(frame) : nullptr;
    api.decref(frame);
    frame = back;
  }
}

std::vector<Line> running_calls(const PythonApi& api) {
  std::vector<Line> calls;
  walk_frames(api, [&](PythonObject frame, PythonObject code) {
    calls.push_back({code, api.frame_line(frame)});
    return true;
  });
  return calls;
}

// From the user's innermost frame outwards, or from the innermost one outside of torch; those of packages in between are
// shortened to "site-packages/torch/…".
std::string text_of(Interpreter& known, const std::vector<Line>& calls, bool with_packages) {
  std::string text;
  bool begun = false;
  for (const Line& line : calls) {
    const Code kind = known.code.kind_of(line.code);
    begun = begun || kind == Code::user || (with_packages && kind == Code::package);
    if (!begun) continue;
    const std::string file = known.api.text(line.code, "co_filename");
    const size_t folder = find_packages_folder(file);
    text += (text.empty() ? "" : "\n") + (folder == file.npos ? file : file.substr(folder + 1));
    text += ":" + std::to_string(line.number) + " in " + known.api.text(line.code, "co_name");
  }
  return text;
}

/// Whether the innermost line of the user's code has called copy.deepcopy.
bool copies_deeply(Interpreter& known, const std::vector<Line>& calls) {
  for (const Line& line : calls) {
    if (known.code.kind_of(line.code) == Code::user) return false;
    if (known.api.text(line.code, "co_name") == "deepcopy") return true;
  }
  return false;
}

/// Whether one of the user's functions that run has the word backward in it, as `loss.backward()` or `accelerator.backward(loss)`.
bool names_backward(Interpreter& known, const std::vector<Line>& calls) {
  const PythonReader reader(known.api);
  return std::ranges::any_of(calls, [&](const Line& line) {
    if (known.code.kind_of(line.code) != Code::user) return false;
    const PythonRef names(known.api, known.api.attribute(line.code, "co_names"));
    return std::ranges::any_of(reader.items(names.get()),
                               [&](const PythonRef& name) { return reader.text(name.get()) == "backward"; });
  });
}

// What a line's stack was when it was first reached, or with no line that of the OOM before.
void write_stack(const std::string& text, uint32_t source, uint16_t flags) {
  if (text.empty()) return;
  Event event = thread_state().event(EventKind::stack);
  event.flags = flags;
  event.address = source;
  event.detail = session().writer().intern(std::string_view(text));
  if (source == 0) {
    session().writer().write(event);
  } else {
    session().writer().write_and_keep(event);
  }
}

// Losses and activations are not: nobody calls their eval().
bool has_parameters_or_layers(const PythonApi& api, const PythonReader& reader, PythonObject attributes) {
  return std::ranges::any_of(std::array{"_parameters", "_modules"}, [&](const char* name) {
    const PythonRef dict = reader.entry(attributes, name);
    return reader.is_a(dict.get(), api.dict_type) && !reader.entries(dict.get()).empty();
  });
}

// All modules that are being called, the innermost first.
std::vector<PythonRef> running_modules(Interpreter& known) {
  std::vector<PythonRef> modules;
  walk_frames(known.api, [&](PythonObject frame, PythonObject code) {
    if (known.code.kind_of(code) != Code::module_call) return true;
    if (PythonObject self = known.api.self_of(frame); self != nullptr) modules.emplace_back(known.api, self);
    return true;
  });
  return modules;
}

// Whether model.eval() or the like was called for each of these.
bool all_evaluate(const PythonApi& api, const std::vector<PythonRef>& modules) {
  const PythonReader reader(api);
  bool evaluates = false;
  for (const PythonRef& module : modules) {
    const PythonRef attributes = reader.dict_of(module.get());
    if (!has_parameters_or_layers(api, reader, attributes.get())) continue;
    const PythonRef mode = reader.entry(attributes.get(), "training");
    evaluates = reader.integer(mode.get()) == 0;
    if (!evaluates) return false;
  }
  return evaluates;
}

// By an attribute that is True: gradient_checkpointing of transformers, use_checkpoint, activation_checkpointing …
bool any_asks_for_checkpoints(const PythonApi& api, const std::vector<PythonRef>& modules) {
  const PythonReader reader(api);
  const auto asks = [&](const auto& entry) {
    const auto& [name, value] = entry;
    return name.find("checkpoint") != name.npos && reader.type_name(value.get()) == "bool" &&
           reader.integer(value.get()) == 1;
  };
  return std::ranges::any_of(modules, [&](const PythonRef& module) {
    return std::ranges::any_of(reader.entries(reader.dict_of(module.get()).get()), asks);
  });
}

uint16_t flags_of_running_modules(Interpreter& known) {
  const std::vector<PythonRef> modules = running_modules(known);
  const int evaluate = all_evaluate(known.api, modules) ? kModulesEvaluate : 0;
  const int asks = any_asks_for_checkpoints(known.api, modules) ? kAsksForCheckpoints : 0;
  return static_cast<uint16_t>(evaluate | asks);
}

/// A local variable, or what a function inside of its function shares it by.
PythonRef value_of(const PythonReader& reader, const PythonApi& api, PythonObject variable) {
  if (reader.type_name(variable) == "cell") return reader.attribute(variable, "cell_contents");
  return PythonRef::borrowed(api, variable);
}

// Those that a function shares with others lie behind its own, but for arguments, which are counted already.
size_t count_variables(const PythonReader& reader, const PythonApi& api, PythonObject code) {
  const auto names = [&](const char* which) {
    const PythonRef tuple(api, api.attribute(code, which));
    return reader.items(tuple.get());
  };
  const std::vector<PythonRef> own = names("co_varnames");
  const std::vector<PythonRef> shared = names("co_cellvars");
  const auto is_own = [&](const PythonRef& name) {
    return std::ranges::any_of(own, [&](const PythonRef& one) { return one.get() == name.get(); });
  };
  return own.size() + shared.size() - static_cast<size_t>(std::ranges::count_if(shared, is_own)) +
         names("co_freevars").size();
}

// What their variables refer to, and the attributes of their first ones: of a trainer's `self`. Before Python 3.12 the C API
// gives no variable without keeping all of them, so they are read where they lie.
std::vector<PythonRef> variables_of_callers(Interpreter& known) {
  const PythonReader reader(known.api);
  std::unordered_map<const void*, size_t> counts;  // of variables, by code
  std::vector<PythonRef> values, globals;          // globals: of scripts, as dictionaries
  walk_frames(known.api, [&](PythonObject frame, PythonObject code) {
    counts[code] = count_variables(reader, known.api, code);
    if (known.code.kind_of(code) == Code::user && known.api.text(code, "co_name") == "<module>")
      globals.emplace_back(known.api, known.api.globals_of(frame));
    return true;
  });
  known.frames.walk(known.api, [&](const PythonCall& call) {
    const auto count = counts.find(call.code);
    for (size_t i = 0; count != counts.end() && i < count->second; ++i) {
      PythonObject variable = PythonFrames::local_of(call, i);
      if (variable == nullptr) continue;
      values.push_back(value_of(reader, known.api, variable));
      if (i > 0) continue;
      for (auto& [name, value] : reader.pairs(reader.dict_of(values.back().get()).get()))
        values.push_back(std::move(value));
    }
    return true;
  });
  for (const PythonRef& of_script : globals) {
    for (auto& [name, value] : reader.pairs(of_script.get())) values.push_back(std::move(value));
  }
  return values;
}

uint32_t name_calls(Interpreter& known) {
  const std::vector<PythonRef> calls = running_modules(known);
  return calls.empty() ? 0 : known.modules.name_calls(calls, [&] { return variables_of_callers(known); });
}

/// Whether that holds for each call of the same mark.
bool locate(Interpreter& known, Context& context) {
  PythonObject module = nullptr;
  bool all_known = true;
  const auto source = [&](PythonObject frame, PythonObject code) {
    const Place place{code, known.api.place_in(frame)};
    return source_of(known, place, known.api.frame_line(frame), [&] {
      known.code.register_module(frame);
      return running_calls(known.api);
    });
  };
  walk_frames(known.api, [&](PythonObject frame, PythonObject code) {
    const Code kind = known.code.kind_of(code);
    all_known = all_known && known.code.find(code) != nullptr;
    if (kind == Code::user && context.source == 0) context.source = source(frame, code);
    if (kind == Code::package && context.source == 0 && context.inner_source == 0) {
      context.inner_source = source(frame, code);
    }
    if (kind == Code::module_call && module == nullptr) module = known.api.self_of(frame);
    return context.source == 0 || module == nullptr;
  });
  const PythonRef held(known.api, module);
  if (module == nullptr) return all_known;
  const uint32_t path = known.modules.find(module);
  if (path != 0) {
    context.module = path;
    return all_known;
  }
  if (const uint32_t outer = name_calls(known); outer != 0) context.module = outer;
  return false;
}

void put(const KnownPlaces::Place& place, Context& context) {
  context.source = place.source;
  context.inner_source = place.inner_source;
  if (place.module != 0) context.module = place.module;
}

// The same of calls that may have ended since. Code that was registered before them and lives is still what it was; of
// other code not even that is known, as another one may lie there by now: what lies outside of it is not the line.
void locate_later(Interpreter& known, Context& context, const PythonCalls& then) {
  const std::span calls(then.calls, static_cast<size_t>(then.depth));
  std::vector<std::pair<Place, Code>> places;
  std::vector<Line> lines;
  for (const PythonCall& call : calls) {
    const PythonObject code = const_cast<char*>(call.code);
    const KnownCode* const found = known.code.find(code);
    if (found == nullptr || found->number > then.newest_code) break;
    places.push_back({{code, known.frames.offset_of(call)}, found->kind});
    lines.push_back({code, known.api.code_line(code, places.back().first.instruction)});
  }
  for (size_t i = 0; i < places.size() && context.source == 0; ++i) {
    const auto& [place, kind] = places[i];
    const auto source = [&] { return source_of(known, place, lines[i].number, [&] { return lines; }); };
    if (kind == Code::user) context.source = source();
    if (kind == Code::package && context.inner_source == 0) context.inner_source = source();
  }
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i].second != Code::module_call) continue;
    if (const uint32_t path = known.modules.find(const_cast<void*>(calls[i].first_local)); path != 0)
      context.module = path;
    return;
  }
}

// torch.optim's own code has the optimizer as `self`, whatever class it is of.
void register_running_optimizer(Interpreter& known) {
  PythonObject optimizer = nullptr;
  walk_frames(known.api, [&](PythonObject frame, PythonObject code) {
    const Code kind = known.code.kind_of(code);
    if (kind == Code::optimizer) optimizer = known.api.self_of(frame);
    return optimizer == nullptr && kind != Code::user;
  });
  const PythonRef held(known.api, optimizer);
  if (optimizer != nullptr) known.optimizers.add(optimizer);
}

// Every torch.optim optimizer goes through its groups by `for group in self.param_groups`.
void write_failed_group(Interpreter& known) {
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
    if (group && optimizer) known.optimizers.write_failed(optimizer.get(), group.get());
    return true;
  });
}

/// Calls `use(*python)` with the GIL, unless an exception of Python's is on its way. What it throws is dropped.
template <class Use>
void with_python(Use use) noexcept try {
  if (python == nullptr) return;
  const GilScope gil;
  if (gil.held() && python->api.error() == nullptr) use(*python);
} catch (...) {
}

}  // namespace

void attach_python() noexcept try {
  if (python != nullptr) return;
  auto interpreter = std::make_unique<Interpreter>();
  if (!interpreter->api.load() || interpreter->api.this_thread() == nullptr) return;
  python = interpreter.release();  // never destroyed: used until the process ends
  use_gil_of(python->api);
  const GilScope gil;
  if (!gil.held()) return;
  python->api.self_name = python->api.intern("self");
  python->frames.measure(python->api);
} catch (...) {
}

bool python_attached() noexcept { return python != nullptr; }

const PythonApi* python_api() noexcept { return python == nullptr ? nullptr : &python->api; }

bool python_raises() noexcept {
  if (python == nullptr || python->api.is_initialized() == 0 || python->api.this_thread() == nullptr) return false;
  return python->api.holds_gil() && python->api.error() != nullptr;
}

void locate_in_python(Context& context, KnownPlaces& places) noexcept {
  if (const uint64_t mark = mark_of_python_calls(); mark != 0) {
    const auto is_it = [&](const KnownPlaces::Place& place) { return place.mark == mark; };
    if (const KnownPlaces::Place* const place = places.by_mark.find(mark, is_it)) return put(*place, context);
  }
  with_python([&](Interpreter& known) {
    Context found;
    const bool holds = locate(known, found);
    const KnownPlaces::Place place{.mark = mark_of_python_calls(),  // another one where code was registered
                                   .source = found.source,
                                   .inner_source = found.inner_source,
                                   .module = found.module};
    put(place, context);
    if (holds && place.mark != 0) places.by_mark.add(place.mark, place);
  });
}

bool python_calls_are_distinguished() noexcept {
  if (python == nullptr || python->frames.known()) return true;
  const GilScope gil;
  if (gil.held()) python->frames.measure(python->api);
  return python->frames.known();
}

[[gnu::hot]] uint64_t mark_of_python_calls() noexcept {
  if (python == nullptr) return 0;
  const Interpreter& known = *python;
  const void* const module_call = known.code.module_call();
  uint64_t mark = 0;
  bool in_user_code = false;
  bool in_module = false;
  const auto add = [&](const void* pointer) { mark = mix(mark, reinterpret_cast<uint64_t>(pointer)); };
  known.frames.walk(known.api, [&](const PythonCall& call) {
    if (!in_user_code) add(call.instruction);
    if (!in_module && call.code == module_call) add(call.first_local);
    in_module = in_module || call.code == module_call;
    in_user_code = in_user_code || known.code.is_users(call.code);
    return !in_user_code || !in_module;
  });
  if (mark != 0) mark = mix(mark, known.modules.deaths() + known.code.deaths());
  return mark;
}

void on_interpreter_shutdown(const InterpreterShutdown& end) noexcept {
  if (python == nullptr) return;
  python->frames.forget();
  leave_gil_at_shutdown(end);
}

void PythonCalls::capture() noexcept {
  depth = 0;
  if (python == nullptr) return;
  newest_code = python->code.newest();
  python->frames.walk(python->api, [&](const PythonCall& call) {
    calls[depth++] = call;
    return true;
  });
}

void locate_in_python(Context& context, const PythonCalls& then) noexcept {
  if (then.depth != 0) with_python([&](Interpreter& known) { locate_later(known, context, then); });
}

void write_python_stack() noexcept {
  with_python([](Interpreter& known) {
    const std::vector<Line> calls = running_calls(known.api);
    const int flags = flags_of_running_modules(known) | (copies_deeply(known, calls) ? kCopiesDeeply : 0) |
                      (names_backward(known, calls) ? kNamesBackward : 0);
    write_stack(text_of(known, calls, true), 0, static_cast<uint16_t>(flags));
  });
}

void write_tensor_referrers() noexcept try {
  if (python == nullptr || !python->api.holds_gil() || python->api.error() != nullptr) return;
  TensorReferrers referrers(python->api, python->code);
  referrers.write();
  python->optimizers.register_among(referrers.reached());
} catch (...) {
}

void register_optimizer() noexcept { with_python(register_running_optimizer); }

void write_parameter_groups(bool at_oom) noexcept {
  with_python([at_oom](Interpreter& known) {
    if (at_oom) known.optimizers.search();
    if (at_oom) write_failed_group(known);
    known.optimizers.write_groups();
  });
}

}  // namespace oomdiag
