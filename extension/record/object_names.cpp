#include "extension/record/object_names.h"

#include <utility>

// What weak references call when their objects die is a function of C: one of Python might run a signal handler of the
// program's, and what that raises would be lost in a destructor.

namespace oomdiag {

namespace {

/// PyMethodDef, which is part of the stable ABI.
struct FunctionDefinition {
  const char* name;
  PythonObject (*function)(PythonObject, PythonObject);
  int flags;
  const char* doc;
};
constexpr int kOneArgument = 8;  // METH_O
const PythonApi* api_of_forget = nullptr;

}  // namespace

const ObjectNames::Name* ObjectNames::find(PythonObject object) const {
  const auto entry = entries_.find(object);
  return entry == entries_.end() ? nullptr : &entry->second.name;
}

bool ObjectNames::add(PythonObject object, Name name) {
  if (entries_.contains(object) || !make_callback()) return false;
  PythonRef weak(api_, api_.weak(object, callback_.get()));
  if (!weak) {
    api_.clear_error();
    return false;
  }
  objects_[weak.get()] = object;
  entries_.emplace(object, Entry{std::move(name), std::move(weak)});
  return true;
}

std::vector<PythonObject> ObjectNames::all() const {
  std::vector<PythonObject> result;
  for (const auto& [object, entry] : entries_) result.push_back(object);
  return result;
}

bool ObjectNames::make_callback() {
  static FunctionDefinition definition{"forget", forget, kOneArgument, nullptr};
  if (callback_) return true;
  api_of_forget = &api_;
  const PythonRef self(api_, api_.from_pointer(this));
  if (self) callback_ = PythonRef(api_, api_.function(&definition, self.get(), nullptr));
  if (!callback_) api_.clear_error();
  return static_cast<bool>(callback_);
}

PythonObject ObjectNames::forget(PythonObject self, PythonObject weak) {
  auto* names = static_cast<ObjectNames*>(api_of_forget->to_pointer(self));
  if (const auto found = names->objects_.find(weak); found != names->objects_.end()) {
    const auto entry =
        names->entries_.extract(found->second);  // its reference is dropped when the maps are whole again
    names->objects_.erase(found);
    names->deaths_.fetch_add(1, std::memory_order_relaxed);
  }
  api_of_forget->incref(api_of_forget->none);
  return api_of_forget->none;
}

}  // namespace oomdiag
