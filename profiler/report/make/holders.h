#pragma once

#include <vector>

#include "profiler/explain/facts/common_referrers.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"

namespace oomdiag {

/// Who holds the bytes of each category, in at most kMaxHolders rows of a category: blocks of layers that are alike are one
/// row, and so are, where that is not enough to name four fifths of the bytes, blocks of the same part of each layer, then of
/// each layer, then of the same op. By category, largest first; what does not fit into the rows is left out. A row whose blocks
/// all have one common referrer names it, with `*` for indices in which they differ.
std::vector<ReportHolder> fold_holders(const MemoryState& state, const CommonReferrers& referrers);
inline constexpr size_t kMaxHolders = 8;

/// What the described moment holds of a category.
int64_t bytes_of(const ReportOfDevice& device, Category category);

/// For each category the bytes that none of its holders names, as a holder "others".
std::vector<ReportHolder> list_others(const ReportOfDevice& device);

}  // namespace oomdiag
