#include "extension/record/scope_names.h"

#include <algorithm>
#include <cctype>

#include "extension/record/intern_cache.h"
#include "profiler/whole_number.h"

namespace oomdiag {
namespace {

// "Optimizer.step#Adam.step", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"; a part of a sample's loop is
// named so, too: "sample#forward". Those of the user's form a path, also "request #7".
bool is_of_pytorch(std::string_view name) {
  const size_t at = name.find('#');
  if (at == name.npos || at == 0 || at + 1 == name.size() || name[at - 1] == ' ') return false;
  return name[at + 1] == '_' || std::isalpha(static_cast<unsigned char>(name[at + 1])) != 0;
}

size_t place_of(std::string_view name) {
  const auto last = static_cast<unsigned char>(name.empty() ? '\0' : name.back());
  return name.size() * 7 + last;
}

/// "iteration #" of "iteration 17"; empty where there are no digits.
std::string form_of(std::string_view name) {
  if (std::none_of(name.begin(), name.end(), is_digit)) return {};
  std::string form;
  for (size_t i = 0; i < name.size(); ++i) {
    if (!is_digit(name[i])) {
      form += name[i];
    } else if (i == 0 || !is_digit(name[i - 1])) {
      form += '#';
    }
  }
  return form;
}

}  // namespace

const ScopeName& ScopeNames::find(std::string_view given, NumberedNames& numbered, InternCache& names) {
  ScopeName& recent = recent_[place_of(given) % recent_.size()];
  if (recent.given == given) return recent;
  const std::string_view canonical = numbered.canonical_name(given);
  recent = {.given = std::string(given),
            .canonical = std::string(canonical),
            .id = names.name(canonical),
            .of_pytorch = is_of_pytorch(canonical),
            .of_profiler = given.starts_with("ProfilerStep#"),
            .of_optimizer = canonical.starts_with("Optimizer."),
            .is_optimizer_step = canonical.starts_with("Optimizer.step")};
  return recent;
}

std::string_view NumberedNames::canonical_name(std::string_view name) {
  const std::string form = form_of(name);
  if (form.empty()) return name;
  const std::lock_guard lock(mutex_);
  auto known = forms_.find(form);
  if (known == forms_.end()) {
    if (forms_.size() >= kMaxForms) return "#";
    known = forms_.try_emplace(form).first;
  }
  auto& names = known->second;
  if (names.contains(std::string(name))) return name;
  if (names.size() >= kMaxOfOneForm) return known->first;
  names.emplace(name);
  return name;
}

}  // namespace oomdiag
