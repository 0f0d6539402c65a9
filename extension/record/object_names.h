#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "extension/record/python_api.h"

namespace oomdiag {

/// Names of Python objects that live; keeps none of them alive. All of it with the GIL.
class ObjectNames {
 public:
  struct Name {
    std::string text;
    uint32_t id = 0;  ///< of the text, in the trace
  };

  /// `api` and these names are never destroyed: objects may die until the process ends.
  explicit ObjectNames(const PythonApi& api) : api_(api) {}
  ObjectNames(const ObjectNames&) = delete;
  ObjectNames& operator=(const ObjectNames&) = delete;

  /// Null if it has none.
  const Name* find(PythonObject object) const;
  /// Names an object until it dies. False if it has a name, which it keeps, or cannot be referred to weakly.
  bool add(PythonObject object, Name name);
  /// How many named objects have died: what is known of an address holds until then. Any thread.
  uint64_t deaths() const noexcept { return deaths_.load(std::memory_order_relaxed); }
  /// Those that live.
  std::vector<PythonObject> all() const;

 private:
  struct Entry {
    Name name;
    PythonRef weak;
  };
  /// Python calls it when the object of a weak reference dies; `self` holds the address of these names.
  static PythonObject forget(PythonObject self, PythonObject weak);
  bool make_callback();

  const PythonApi& api_;
  std::atomic<uint64_t> deaths_ = 0;
  PythonRef callback_;
  std::unordered_map<PythonObject, Entry> entries_;
  std::unordered_map<PythonObject, PythonObject> objects_;  ///< by their weak references
};

}  // namespace oomdiag
