#include "extension/record/numbered_names.h"

#include <algorithm>

namespace oomdiag {
namespace {

bool is_digit(char letter) { return letter >= '0' && letter <= '9'; }

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
