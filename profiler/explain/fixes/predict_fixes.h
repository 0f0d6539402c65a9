#pragma once

#include <vector>

#include "profiler/explain/findings.h"
#include "profiler/explain/reason.h"
#include "profiler/explain/step/step_model.h"

namespace oomdiag {

/// The fixes that apply and lower the peak by a hundredth or more, best first; each formula stands above its rule, and in
/// words in the rows of fixes.h. What is said to fit gets through the allocator as well (simulate_fits.h). Where nothing alone may be enough, pairs.
std::vector<Fix> predict_fixes(const StepModel& model);

/// Whether `a` is to be tried before `b`: it fits (measured, else predicted) and `b` may not; it cures a leak; it changes
/// nothing of what is learned; it costs less; its peak is lower.
bool is_better(const Fix& a, const Fix& b);

/// Puts the fix that cures `reason` before the others. Its peak is a lower bound: what had been allocated without what the
/// reason holds.
void add_cure(const Reason& reason, const StepModel& model, std::vector<Fix>& fixes);

/// Removes what is the same change as `cure`, as a row predicts it from the step, and gives its figure to the cure; its lines too,
/// where the cure has none. Not where that is said not to fit: the step may not be all that the cure shrinks. In a
/// leak it is not all: there such a row goes without its figure.
void replace_same(Fix& cure, std::vector<Fix>& fixes, bool of_leak = false);

}  // namespace oomdiag
