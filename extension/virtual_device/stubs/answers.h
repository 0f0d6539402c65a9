#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <type_traits>

#include "extension/virtual_device/entry_point.h"

// What the answers that stubs/answer.py generates, and those that are written by hand, have in common.

namespace oomdiag {

/// An integer that a program passed, with the parameter's name in the library's header.
struct Dimension {
  std::string_view name;
  int64_t value = 0;
};
using Dimensions = std::initializer_list<Dimension>;

/// The value that was passed as `name`, else `absent`.
inline int64_t find_dimension(Dimensions dimensions, std::string_view name, int64_t absent = 0) {
  for (const Dimension& dimension : dimensions) {
    if (dimension.name == name) return dimension.value;
  }
  return absent;
}

/// An opaque object of its own for each call, which programs keep state by; answers success, 0 in every library.
struct Success {
  template <typename Status>
  operator Status() const {
    return static_cast<Status>(0);
  }
};

template <typename Kept = char, typename Object>
Success give_new(Object* object) {
  *object = reinterpret_cast<Object>(new Kept);
  return {};
}

template <typename Object, typename Handle>
Success destroy(Handle handle) {
  delete reinterpret_cast<const Object*>(handle);
  return {};
}

template <typename Object>
Success take_back(Object object) {
  return destroy<char>(object);
}

/// Writes an answer where the caller asked for it; null: it did not.
template <typename Value>
Success give(std::type_identity_t<Value> value, Value* place) {
  if (place) *place = value;
  return {};
}

}  // namespace oomdiag
