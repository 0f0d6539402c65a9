#pragma once

#include <cstdint>

#include "extension/record/cache_table.h"

namespace at {
struct RecordFunction;
}

namespace oomdiag {

/// An op that is called where `outside` is the place in the program.
struct KnownCall {
  const char* text = nullptr;  ///< the op's name: the text of its registration
  uint32_t outside = 0;        ///< id of a context
  uint32_t name = 0;           ///< id of the op's name
  uint32_t inside = 0;         ///< id of the context inside of it, 0 where that does not follow from `outside`
  bool is_builtin = false;     ///< an op of PyTorch's own
};

/// The calls of registered ops that a thread has seen, by the addresses of the ops' names: to look at the names takes
/// longer than all else, since they are out of the caches. The addresses hold until an op is taken out of PyTorch's
/// list. One thread.
class KnownCalls {
 public:
  /// There until the next call of a function; null if it is not known.
  const KnownCall* find(const char* text, uint32_t outside);
  void add(const KnownCall& call);

 private:
  CacheTable<KnownCall> calls_;
  uint64_t departures_ = 0;  ///< of ops, when the first of `calls_` was added
};

/// From here on it is noticed when an op is taken out of PyTorch's list. Once is enough; locks that list.
void watch_departures_of_ops();
/// Whether the call's name is the text of a registered op.
bool is_registered(const at::RecordFunction& call);

}  // namespace oomdiag
