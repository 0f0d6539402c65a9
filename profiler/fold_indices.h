#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "profiler/whole_number.h"

namespace oomdiag {

/// "transformer.h.*.mlp" of "transformer.h.11.mlp": bare numbers are indices of layers that are alike.
inline std::string fold_indices(std::string_view path) {
  std::string folded;
  while (true) {
    const size_t dot = std::min(path.find('.'), path.size());
    const std::string_view part = path.substr(0, dot);
    folded += is_number(part) ? "*" : part;
    if (dot == path.size()) return folded;
    folded += '.';
    path.remove_prefix(dot + 1);
  }
}

/// In the name of a variable: an item of a dictionary by any of its keys.
inline constexpr std::string_view kAnyKey = "[\"*\"]";

/// "list 'sessions["*"].history' in f" of "list 'sessions["anna"].history' in f": the same of keys that are text. Names of modules are none.
inline std::string fold_keys(std::string_view variable) {
  constexpr std::string_view kBegin = "[\"", kEnd = "\"]";
  std::string folded;
  for (size_t at = variable.find(kBegin); at != variable.npos; at = variable.find(kBegin)) {
    const size_t end = variable.find(kEnd, at + kBegin.size());
    if (end == variable.npos) break;
    const bool is_module = variable.substr(0, at).ends_with("_modules");
    folded += variable.substr(0, at);
    folded += is_module ? variable.substr(at, end + kEnd.size() - at) : kAnyKey;
    variable.remove_prefix(end + kEnd.size());
  }
  return folded + std::string(variable);
}

/// "attribute 'nets[*].seen' in f" of "attribute 'nets[3].seen' in f": numbers in brackets are indices of items that are alike.
inline std::string fold_subscripts(std::string_view variable) {
  std::string folded;
  for (size_t i = 0; i < variable.size(); ++i) {
    folded += variable[i];
    if (variable[i] != '[') continue;
    const size_t end = std::min(variable.find_first_not_of("0123456789", i + 1), variable.size());
    if (end == i + 1 || end == variable.size() || variable[end] != ']') continue;
    folded += '*';
    i = end - 1;
  }
  return folded;
}

}  // namespace oomdiag
