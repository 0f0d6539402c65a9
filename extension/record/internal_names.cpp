#include "extension/record/internal_names.h"

#include <ATen/ops/add_ops.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/engine.h>

#include <atomic>
#include <iterator>
#include <string>
#include <string_view>

#include "extension/python_symbols.h"
#include "extension/record/gil.h"
#include "extension/record/native_stack.h"
#include "extension/record/program_code.h"
#include "extension/record/python.h"
#include "extension/record/python_node.h"
#include "extension/record/session.h"
#include "extension/torch_version.h"

namespace oomdiag {

namespace {

constexpr bool rows_are_in_order() {
  for (const InternalNameFacts& row : kInternalNames) {
    for (const InternalNameFacts& other : kInternalNames) {
      if (&row != &other && row.which == other.which) return false;
    }
  }
  return std::size(kInternalNames) == static_cast<size_t>(InternalName::python_frames) + 1;
}
static_assert(rows_are_in_order(), "each name has one row");

const InternalNameFacts& facts_of(InternalName which) {
  const InternalNameFacts* row = kInternalNames;
  while (row->which != which) ++row;
  return *row;
}

template <class Function>
std::string_view symbol_of(Function* function) {
  Dl_info found{};
  const bool known = dladdr(reinterpret_cast<const void*>(function), &found) != 0 && found.dli_sname != nullptr;
  return known ? found.dli_sname : "";
}

/// "torch 2.15.0+cu132", "Python 3.15.0"
std::string version_of(InternalName which) {
  if (which != InternalName::python_frames) return "torch " + loaded_torch_version();
  const std::string_view version = python_symbols::version();
  return "Python " + std::string(version.substr(0, version.find(' ')));
}

void check(bool is_there, InternalName which) {
  if (!is_there) note_missing(which);
}

/// What is looked for in torch's Python modules, as far as they are loaded. With the GIL.
class PythonCheck {
 public:
  explicit PythonCheck(const PythonApi& api) : api_(api), reader_(api) {}

  void run() const {
    if (const PythonRef module = dict_of_class("torch.nn.modules.module", "Module")) {
      const PythonRef call = reader_.entry(module.get(), "__call__");
      check(call && is_module_call(code_of(call)), InternalName::module_call);
    }
    if (const PythonRef optimizer = dict_of_class("torch.optim.optimizer", "Optimizer")) {
      const PythonRef step = static_method(reader_.entry(optimizer.get(), "profile_hook_step"));
      check(step && has_constant(code_of(step), "Optimizer.step#"), InternalName::optimizer_step);
    }
    if (const PythonRef sgd = dict_of_class("torch.optim.sgd", "SGD")) {
      check(has_variable(reader_.entry(sgd.get(), "step"), "group"), InternalName::group_variable);
    }
    const PythonRef tensor = dict_of_class("torch._C", "TensorBase");
    check(tensor && reader_.entry(tensor.get(), "_cdata"), InternalName::tensor_address);
    check(python_nodes_are_readable(api_), InternalName::saved_by_python);
  }

 private:
  PythonRef dict_of_class(const char* module, const char* name) const {
    const PythonRef found = reader_.find(module, name);
    return found ? reader_.dict_of(found.get()) : PythonRef();
  }
  /// Null where it is no function of Python.
  PythonObject code_of(const PythonRef& function) const {
    return reader_.is_a(function.get(), api_.function_type) ? api_.function_code(function.get()) : nullptr;
  }
  /// A function, also if it is wrapped by staticmethod().
  PythonRef static_method(PythonRef function) const {
    if (!function || reader_.is_a(function.get(), api_.function_type)) return function;
    return reader_.attribute(function.get(), "__func__");
  }
  bool is_module_call(PythonObject code) const { return code != nullptr && is_call_of_module(api_, code); }
  bool has_constant(PythonObject code, std::string_view searched) const {
    if (code == nullptr) return false;
    const PythonRef type(api_, api_.type(code));
    const PythonRef constants(api_, api_.attribute(code, "co_consts"));
    for (const PythonRef& constant : reader_.items(constants.get())) {
      if (reader_.text(constant.get()).starts_with(searched)) return true;
      if (reader_.is_a(constant.get(), type.get()) && has_constant(constant.get(), searched)) return true;
    }
    return false;
  }
  /// Of a function, or of the one that it wraps.
  bool has_variable(const PythonRef& function, std::string_view searched) const {
    const PythonRef wrapped =
        function ? reader_.entry(reader_.dict_of(function.get()).get(), "__wrapped__") : PythonRef();
    const PythonObject code = code_of(wrapped ? wrapped : function);
    if (code == nullptr) return false;
    const PythonRef names(api_, api_.attribute(code, "co_varnames"));
    for (const PythonRef& name : reader_.items(names.get())) {
      if (reader_.text(name.get()) == searched) return true;
    }
    return false;
  }

  const PythonApi& api_;
  PythonReader reader_;
};

}  // namespace

void check_internal_names() noexcept try {
  check(is_operator_symbol(symbol_of(&at::_ops::add_Tensor::call)), InternalName::operator_symbols);
  check(is_engine_symbol(symbol_of(&torch::autograd::Engine::get_default_engine)), InternalName::engine_symbol);
  if (python_api() == nullptr) return;
  const GilScope gil;
  if (!gil.held() || python_api()->error() != nullptr) return;
  check(python_calls_are_distinguished(), InternalName::python_frames);
  PythonCheck(*python_api()).run();
} catch (...) {
}

void note_missing(InternalName which) noexcept try {
  static std::atomic<uint32_t> noted = 0;
  const uint32_t bit = 1u << static_cast<uint32_t>(which);
  if ((noted.fetch_or(bit) & bit) != 0) return;
  const InternalNameFacts& facts = facts_of(which);
  const std::string text = std::string(kNotFound) + version_of(which) + ": " + facts.name + " in " + facts.where;
  write_note(facts.lost, text.c_str());
} catch (...) {
}

}  // namespace oomdiag
