#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "extension/record/intern_cache.h"

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

/// What the name of a user scope says.
struct ScopeName {
  std::string given{};        ///< by the program
  std::string canonical{};    ///< as NumberedNames has it
  uint32_t id = 0;            ///< of `canonical`, in the trace
  bool of_pytorch = false;    ///< "Optimizer.step#Adam.step": no part of the user's paths
  bool of_profiler = false;   ///< what torch.profiler keeps open for a whole step: no place in the program
  bool of_optimizer = false;  ///< "Optimizer.…"
  bool is_optimizer_step = false;

  bool is_folded() const { return canonical != given; }
};

/// The scopes that a thread saw last: in a training they are the same few in each step. One thread.
class ScopeNames {
 public:
  /// There until the next call.
  const ScopeName& find(std::string_view given, NumberedNames& numbered, InternCache& names);

 private:
  std::array<ScopeName, 16> recent_;
};

}  // namespace oomdiag
