#pragma once

#include <string_view>
#include <vector>

#include "profiler/explain/findings.h"
#include "profiler/report/report.h"

namespace oomdiag {

/// The fix with this id and label, or null: those of one id may change different parts of a program.
Fix* find_same(std::vector<Fix>& fixes, std::string_view id, std::string_view label);

/// Takes into `failed` what another run of the same program showed that had all the memory it requested, and whose
/// fixes were judged by the GPU of `failed`: the need, then measured, and the fixes. Where the failing moment looked
/// like fragmentation or a workspace and the whole run does not fit at all, the cause is capacity. Nothing is taken
/// where the program grows without end, ran out again, or sized itself by the GPU.
void take_whole_run(Report& failed, const Report& whole);

/// Whether a peak on a GPU with far more memory than any program needs shows a program that takes a share of its GPU:
/// what it does there says nothing about another GPU.
bool is_share_of_gpu(int64_t peak_bytes, int64_t gpu_bytes);

/// Takes into a report that was made anew from a trace what an `earlier` one on the same run had from other runs: the need
/// and the fixes of a whole run, and figures that were measured.
void keep_measured(Report& report, const Report& earlier);

}  // namespace oomdiag
