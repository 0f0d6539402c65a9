#pragma once

#include <cstddef>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace oomdiag {

/// Programs number their scopes, "iteration 17", and every number would be a place of its own until the trace has no
/// space for places. So of names that differ only by numbers the first ones are kept as they are, which is enough for
/// the layers of a model, and all others by their form, "iteration #". Any thread.
class NumberedNames {
 public:
  static constexpr size_t kMaxOfOneForm = 128;
  static constexpr size_t kMaxForms = 4096;  ///< after them all new ones become "#"

  /// What this name is recorded as: itself, or a text that lives as long as this. Locks where the name has digits.
  std::string_view canonical_name(std::string_view name);

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, std::unordered_set<std::string>> forms_;
};

}  // namespace oomdiag
