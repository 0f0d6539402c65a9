#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "extension/record/intern_cache.h"
#include "extension/record/numbered_names.h"

namespace oomdiag {

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
