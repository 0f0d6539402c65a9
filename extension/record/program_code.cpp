#include "extension/record/program_code.h"

#include <string>

#include "extension/python_symbols.h"
#include "extension/record/python_api.h"

namespace oomdiag {

namespace {

// Of a program that has more of it at a time the rest is looked at each time anew.
constexpr size_t kMaxCode = 1 << 16;

}  // namespace

bool is_call_of_module(const PythonApi& api, PythonObject code) {
  return api.text(code, "co_filename").ends_with("/torch/nn/modules/module.py") &&
         api.text(code, "co_name") == "_wrapped_call_impl";
}

// As the module "os" lies there. A user's own files may be below ".../lib/python3.11/", too.
bool ProgramCode::is_of_standard_library(std::string_view file) {
  if (standard_library_.empty()) {
    const PythonReader reader(api_);
    const std::string os = reader.text(reader.find("os", "__file__").get());
    standard_library_ = os.substr(0, os.rfind('/') + 1);
    if (standard_library_.empty()) standard_library_ = "<";
  }
  return file.starts_with(standard_library_) || file.starts_with("<frozen");
}

Code ProgramCode::classify(PythonObject code) {
  const std::string file = api_.text(code, "co_filename");
  if (is_call_of_module(api_, code)) return Code::module_call;
  if (file.ends_with("/torch/optim/optimizer.py")) return Code::optimizer;
  if (const size_t package = find_package(file); package != file.npos) {
    return file.compare(package, 6, "torch/") == 0 ? Code::nobody : Code::package;
  }
  return is_of_standard_library(file) ? Code::nobody : Code::user;
}

Code ProgramCode::kind_of(PythonObject code) {
  Recent& known = recent(code);
  if (known.code == code) return known.kind;
  const Code kind = register_code(code);
  if (find(code) != nullptr) known = {code, kind};
  return kind;
}

Code ProgramCode::register_code(PythonObject code) {
  if (const KnownCode* const known = find(code)) return known->kind;
  const Code kind = classify(code);
  const uint64_t number = newest_.load(std::memory_order_relaxed) + 1;
  if (codes_.size() >= kMaxCode || !codes_.add(code, {.kind = kind, .number = number, .sources = {}})) return kind;
  newest_.store(number, std::memory_order_relaxed);
  if (kind == Code::module_call) module_call_.store(code, std::memory_order_relaxed);
  if (kind == Code::user) {
    users_.add(code);
    register_inner(code);
  }
  return kind;
}

void ProgramCode::forget(void* self, PythonObject code) {
  auto& mine = *static_cast<ProgramCode*>(self);
  if (Recent& known = mine.recent(code); known.code == code) known = {};
  mine.users_.remove(code);
  PythonObject module_call = code;
  mine.module_call_.compare_exchange_strong(module_call, nullptr);
}

// Where a function that has not run yet ends steady training, it is known so (locate_later). These are those inside of one that
// was registered; below, those of its module.
void ProgramCode::register_inner(PythonObject code) {
  const PythonReader reader(api_);
  const PythonRef type(api_, api_.type(code));
  const PythonRef constants(api_, api_.attribute(code, "co_consts"));
  for (const PythonRef& constant : reader.items(constants.get())) {
    if (reader.is_a(constant.get(), type.get())) register_code(constant.get());
  }
}

void ProgramCode::register_functions(PythonObject dict, bool with_classes) {
  const PythonReader reader(api_);
  for (const auto& [name, value] : reader.entries(dict)) {
    if (reader.is_a(value.get(), api_.function_type)) {
      register_code(api_.function_code(value.get()));
    } else if (with_classes && reader.is_a(value.get(), api_.type_type)) {
      register_functions(reader.dict_of(value.get()).get(), false);
    }
  }
}

void ProgramCode::register_module(PythonObject frame) {
  const PythonRef names(api_, api_.globals_of(frame));
  if (names && searched_.insert(names.get()).second) register_functions(names.get(), true);
}

}  // namespace oomdiag
