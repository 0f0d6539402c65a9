#pragma once

#include <vector>

#include "profiler/explain/findings.h"
#include "profiler/explain/step_model.h"

namespace oomdiag {

/// The fixes that apply and lower the peak by a hundredth or more, best first; each formula stands above its rule, and in
/// words in kFixes. What is said to fit gets through the allocator as well (arena.h). Where nothing alone may be enough, pairs.
std::vector<Fix> predict_fixes(const StepModel& model);

/// Whether `a` is to be tried before `b`: it fits (measured, else predicted) and `b` may not; it cures a leak; it changes
/// nothing of what is learned; it costs less; its peak is lower.
bool is_better(const Fix& a, const Fix& b);

}  // namespace oomdiag
