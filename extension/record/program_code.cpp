#include "extension/record/program_code.h"

#include <algorithm>
#include <string>

namespace oomdiag {

namespace {

// Of a program that makes code all the time the rest is looked at each time anew.
constexpr size_t kMostCode = 1 << 16;

/// "/usr/lib/python3.11/copy.py", "<frozen runpy>".
bool is_standard_library(std::string_view file) {
  constexpr std::string_view kFolder = "/lib/python3.";
  const size_t folder = file.find(kFolder);
  if (folder == file.npos) return file.starts_with("<frozen");
  const size_t end = file.find_first_not_of("0123456789t", folder + kFolder.size());
  return end != file.npos && end > folder + kFolder.size() && file[end] == '/';
}

}  // namespace

size_t find_package(std::string_view file) {
  const size_t folder = std::min(file.rfind("/site-packages/"), file.rfind("/dist-packages/"));
  return folder == file.npos ? file.npos : folder + std::string_view("/site-packages/").size();
}

Code ProgramCode::classify(PythonObject code) const {
  const std::string file = api_.text(code, "co_filename");
  if (file.ends_with("/torch/nn/modules/module.py")) {
    return api_.text(code, "co_name") == "_wrapped_call_impl" ? Code::module_call : Code::nobody;
  }
  if (file.ends_with("/torch/optim/optimizer.py")) return Code::optimizer;
  if (const size_t package = find_package(file); package != file.npos) {
    return file.compare(package, 6, "torch/") == 0 ? Code::nobody : Code::package;
  }
  return is_standard_library(file) ? Code::nobody : Code::user;
}

Code ProgramCode::kind_of(PythonObject code) {
  auto& recent = recent_[(reinterpret_cast<uintptr_t>(code) >> 4) % std::size(recent_)];
  if (recent.code == code) return recent.kind;
  const Code kind = meet(code);
  if (holds(code)) recent = {code, kind};
  return kind;
}

Code ProgramCode::meet(PythonObject code) {
  if (const auto entry = kinds_.find(code); entry != kinds_.end()) return entry->second;
  const Code kind = classify(code);
  if (kinds_.size() >= kMostCode) return kind;
  api_.incref(code);
  kinds_.emplace(code, kind);
  if (kind == Code::module_call) module_call_.store(code, std::memory_order_relaxed);
  if (kind == Code::user) {
    users_.add(code);
    meet_inner(code);
  }
  return kind;
}

// Where a function that has not run yet ends steady training, it is known so (locate_later). These are those inside of one that
// was met; below, those of its module.
void ProgramCode::meet_inner(PythonObject code) {
  const PythonReader reader(api_);
  const PythonRef type(api_, api_.type(code));
  const PythonRef constants(api_, api_.attribute(code, "co_consts"));
  for (const PythonRef& constant : reader.items(constants.get())) {
    if (reader.is_a(constant.get(), type.get())) meet(constant.get());
  }
}

void ProgramCode::meet_functions(PythonObject dict, bool with_classes) {
  const PythonReader reader(api_);
  for (const auto& [name, value] : reader.entries(dict)) {
    if (reader.is_a(value.get(), api_.function_type)) {
      meet(api_.function_code(value.get()));
    } else if (with_classes && reader.is_a(value.get(), api_.type_type)) {
      meet_functions(reader.dict_of(value.get()).get(), false);
    }
  }
}

void ProgramCode::meet_module(PythonObject frame) {
  const PythonRef names(api_, api_.globals_of(frame));
  if (names && searched_.insert(names.get()).second) meet_functions(names.get(), true);
}

}  // namespace oomdiag
