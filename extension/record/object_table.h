#pragma once

#include <atomic>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "extension/python_symbols.h"
#include "extension/record/python_api.h"

namespace oomdiag {

/// Values by the Python object that they describe, until the object dies; keeps none alive. All of it with the GIL.
///
/// What a weak reference calls when its object dies is a function of C: one of Python might run a signal handler of the
/// program's, and what that raises would be lost in a destructor. It locks nothing, as it also runs in a forked child.
template <class Value>
class ObjectTable {
 public:
  using OnDeath = void (*)(void* owner, PythonObject object);

  /// `api` and this table are never destroyed: objects may die until the process ends. `on_death(owner, object)`, if there is
  /// one, is called when the value of an object that dies has been removed, before its address may be used again.
  explicit ObjectTable(const PythonApi& api, OnDeath on_death = nullptr, void* owner = nullptr)
      : api_(api), on_death_(on_death), owner_(owner) {}
  ObjectTable(const ObjectTable&) = delete;
  ObjectTable& operator=(const ObjectTable&) = delete;

  /// Null if the object has none.
  Value* find(PythonObject object) {
    const auto entry = entries_.find(object);
    return entry == entries_.end() ? nullptr : &entry->second.value;
  }
  const Value* find(PythonObject object) const { return const_cast<ObjectTable*>(this)->find(object); }
  /// Describes an object until it dies. False if it has a value, which it keeps, or cannot be referred to weakly.
  bool add(PythonObject object, Value value) {
    if (entries_.contains(object) || !make_callback()) return false;
    PythonRef weak(api_, api_.weak(object, callback_.get()));
    if (!weak) {
      api_.clear_error();
      return false;
    }
    objects_[weak.get()] = object;
    entries_.emplace(object, Entry{std::move(value), std::move(weak)});
    return true;
  }
  size_t size() const { return entries_.size(); }
  /// How many objects of the table have died: what is known of an address holds until then. Any thread, without the GIL.
  uint64_t deaths() const noexcept { return deaths_.load(std::memory_order_relaxed); }
  /// Those that live.
  std::vector<PythonObject> all() const {
    std::vector<PythonObject> result;
    for (const auto& [object, entry] : entries_) result.push_back(object);
    return result;
  }

 private:
  struct Entry {
    Value value;
    PythonRef weak;
  };

  /// Python calls it when the object of a weak reference dies; `self` holds the address of this table.
  static PythonObject erase(PythonObject self, PythonObject weak) {
    static_cast<ObjectTable*>(api_of_erase->to_pointer(self))->erase_object_of(weak);
    api_of_erase->incref(api_of_erase->none);
    return api_of_erase->none;
  }
  void erase_object_of(PythonObject weak) {
    const auto found = objects_.find(weak);
    if (found == objects_.end()) return;
    const PythonObject object = found->second;
    const auto entry = entries_.extract(object);  // its reference is dropped when the maps are whole again
    objects_.erase(found);
    deaths_.fetch_add(1, std::memory_order_relaxed);
    if (on_death_ != nullptr) on_death_(owner_, object);
  }
  bool make_callback() {
    static PythonMethod method{"erase", erase, PythonMethod::kOneArgument, nullptr};
    if (callback_) return true;
    api_of_erase = &api_;
    const PythonRef self(api_, api_.from_pointer(this));
    if (self) callback_ = PythonRef(api_, api_.function(&method, self.get(), nullptr));
    if (!callback_) api_.clear_error();
    return static_cast<bool>(callback_);
  }

  inline static const PythonApi* api_of_erase = nullptr;
  const PythonApi& api_;
  const OnDeath on_death_;
  void* const owner_;
  std::atomic<uint64_t> deaths_ = 0;
  PythonRef callback_;
  std::unordered_map<PythonObject, Entry> entries_;
  std::unordered_map<PythonObject, PythonObject> objects_;  ///< by their weak references
};

}  // namespace oomdiag
