// torch.ops.oomdiag.* and torch.classes.oomdiag.Session: for eager Python, for scripted code and for C++ that has only the
// dispatcher. What they do is in oomdiag.h.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <cstdio>
#include <exception>

#include "extension/oomdiag.h"
#include "extension/own_report.h"
#include "extension/record/graph_walk.h"
#include "extension/record/session.h"
#include "extension/record/thread_state.h"
#include "extension/torch_version.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

/// Our errors become PyTorch's: a RuntimeError in Python.
template <class Function>
auto translated(Function function) {
  try {
    return function();
  } catch (const Error& error) {
    TORCH_CHECK(false, "oomdiag: ", error.what(), error.hint().empty() ? "" : "; ", error.hint());
  }
}

using Dictionary = c10::Dict<std::string, int64_t>;

Dictionary to_dictionary(const std::map<std::string, int64_t>& figures) {
  Dictionary result;
  for (const auto& [name, figure] : figures) result.insert(name, figure);
  return result;
}

std::string op_start(const std::string& folder) {
  return translated([&] { return start(folder); });
}
bool op_is_recording() { return recording_is_wanted(); }
void op_stop() { stop(); }
void op_mark(const std::string& name) { mark(name); }
std::string op_report() { return translated(report); }
std::string op_explain() { return translated(explain); }
Dictionary op_peak() {
  return translated([] { return to_dictionary(peak()); });
}

/// Of the graph behind `root`, or without it as the report has them.
Dictionary op_saved_tensors(const std::optional<at::Tensor>& root) {
  return translated([&] {
    if (!root) return to_dictionary(saved_tensors());
    if (!recording()) throw Error(ErrorKind::usage, "nothing is recorded in this process", "call start() first");
    walk_graph_of(thread_state(), *root);
    return to_dictionary(ask_own_figures("last_walk"));
  });
}

/// Records from its making to stop(). There is one recording per process: several of these share it.
struct ScriptSession : torch::CustomClassHolder {
  explicit ScriptSession(const std::string& in) : trace(op_start(in)) {}
  std::string trace;
};
using Self = c10::intrusive_ptr<ScriptSession>;

void define(torch::Library& ops) {
  // Conservative: TorchScript must neither drop these calls nor move them, though no tensor ties them to their place.
  const auto add = [&](const char* schema, auto function) {
    ops.def(torch::schema(schema, c10::AliasAnalysisKind::CONSERVATIVE),
            torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, std::move(function)));
  };
  add("start(str folder=\"\") -> str", TORCH_FN(op_start));
  add("is_recording() -> bool", TORCH_FN(op_is_recording));
  add("stop() -> ()", TORCH_FN(op_stop));
  add("mark(str name) -> ()", TORCH_FN(op_mark));
  add("report() -> str", TORCH_FN(op_report));
  add("explain() -> str", TORCH_FN(op_explain));
  add("peak() -> Dict(str, int)", TORCH_FN(op_peak));
  add("saved_tensors(Tensor? root=None) -> Dict(str, int)", TORCH_FN(op_saved_tensors));

  ops.class_<ScriptSession>("Session")
      .def(torch::init<std::string>(), "", {torch::arg("folder") = std::string()})
      .def("trace", [](const Self& self) { return self->trace; })
      .def("start", [](const Self&) { return op_start(""); })
      .def("stop", [](const Self&) { op_stop(); })
      .def("mark", [](const Self&, const std::string& name) { op_mark(name); })
      .def("report", [](const Self&) { return op_report(); })
      .def("explain", [](const Self&) { return op_explain(); })
      .def("peak", [](const Self&) { return op_peak(); })
      .def("saved_tensors", [](const Self&, const std::optional<at::Tensor>& root) { return op_saved_tensors(root); });
}

/// Why this copy of the library must stay without effect, or empty. PyTorch ends the process when a name is registered twice.
std::string find_objection() {
  const std::string version = loaded_torch_version();
  if (!version.empty() && minor_version(version) != OOMDIAG_TORCH_MINOR) {
    return "it was built for torch " OOMDIAG_TORCH_MINOR ", the program has " + version;
  }
  if (c10::Dispatcher::singleton().findSchema({"oomdiag::start", ""})) return "another copy of it is loaded already";
  return {};
}

// Where the library is loaded. What a static initialiser throws would end the process.
bool register_ops() noexcept try {
  if (const std::string objection = find_objection(); !objection.empty()) {
    std::fprintf(stderr, "oomdiag: warning: this liboomdiag.so has no effect: %s\n", objection.c_str());
    retire();
    return false;
  }
  static auto* const ops = new torch::Library(torch::Library::DEF, "oomdiag", std::nullopt, __FILE__, __LINE__);
  define(*ops);
  return true;
} catch (const std::exception& error) {
  std::fprintf(stderr, "oomdiag: warning: torch.ops.oomdiag is not there: %s\n", error.what());
  return false;
}

[[maybe_unused]] const bool is_registered = register_ops();

}  // namespace
}  // namespace oomdiag
