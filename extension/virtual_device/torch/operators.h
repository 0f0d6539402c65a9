#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <cstdint>

namespace oomdiag {

/// What the contents of an operator's results follow from.
struct OperatorRules {
  enum class Argument : uint8_t {
    read,        ///< its contents matter
    written,     ///< they matter, and change
    overwritten  ///< they change, whatever they were
  };
  std::optional<c10::OperatorHandle> handle{};
  std::vector<Argument> arguments{};
  bool is_computable = false;         ///< elementwise, or one of a few that put values together: cheap on small inputs
  bool answers = false;               ///< with truth values or whole numbers, whatever it reads
  bool copies = false;                ///< its results are what it read, whatever the size
  bool takes_uniform_values = false;  ///< where all it reads is one number, so is each of its results
  bool sums = false;                  ///< … multiplied by how many numbers went into each
  bool compares = false;              ///< for (in)equality
  bool validates = false;             ///< fails by contents of its arguments: sums of weights or windows that are zero
  /// What it works out on the GPU and then asks for: how many there are (of truth values how many are true, where it sorts
  /// none: Unique.cu), or whether it is so.
  enum class Asks : uint8_t { nothing, nonzero, distinct, distinct_or_trues, truth };
  Asks asks = Asks::nothing;
  bool is_foreign = false;        ///< not PyTorch's own: what its kernels write is not known
  bool changes_contents = false;  ///< of its arguments
  bool has_kernels = false;       ///< of its own: what it makes was written by them, though it was zeros to begin with
};

/// The rules for the operator that is called; remembers them by thread. One with no handle leaves all contents alone.
OperatorRules& find_rules(const at::RecordFunction& call);

}  // namespace oomdiag
