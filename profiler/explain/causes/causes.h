#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "profiler/explain/facts/facts.h"
#include "profiler/replay/history.h"

namespace oomdiag {

/// Why a request failed; exactly one is the primary cause. Design §5. The order is that of kCauseNames only; which of them it
/// is, the rows of kCauses decide.
enum class CauseKind : uint8_t {
  capacity,
  fragmentation,
  pending_frees,
  non_pytorch,
  oversized_request,
  fraction_cap,
  leak,
  workspace,
  imbalance
};
inline constexpr std::string_view kCauseNames[] = {"capacity",    "fragmentation",     "pending_frees",
                                                   "non_pytorch", "oversized_request", "fraction_cap",
                                                   "leak",        "workspace",         "imbalance"};
inline constexpr size_t kCauseKindCount = std::size(kCauseNames);

constexpr std::string_view name_of(CauseKind kind) { return kCauseNames[static_cast<size_t>(kind)]; }

/// One cause: when it is the one, and what is said about it.
struct CauseRow {
  CauseKind kind;
  std::string_view because;  ///< what of that kind; unique within it
  bool (*holds)(const FailureFacts& facts);
  /// What is missing even if every cached byte could be used; 0 where nothing is.
  int64_t (*short_by)(const FailureFacts& facts);
  /// One sentence with its figures. `allocations`: of non-PyTorch memory, largest first.
  std::string (*words)(const FailureFacts& facts, std::span<const NonPytorchOwner> owners);
};

/// The first row that holds; the last one always does.
const CauseRow& decide_cause(const FailureFacts& facts);

/// The row with this name; the last one for an unknown name, as of a report of another version.
const CauseRow& find_cause_row(CauseKind kind, std::string_view because);

}  // namespace oomdiag
