#pragma once

#include <vector>

#include "cli/experiments/fit_plan.h"
#include "cli/experiments/fit_values.h"
#include "cli/experiments/fix.h"
#include "cli/experiments/fix_plan.h"
#include "profiler/export/search_page.h"

namespace oomdiag {

/// What the page of a search shows: every run of each GPU by its values, every plan, every fix.
std::vector<SearchRow> rows_of(const std::vector<FitOfGpu>& gpus);
std::vector<SearchRow> rows_of(const std::vector<Plan>& plans);
std::vector<SearchRow> rows_of(const Fixed& fixed);
std::vector<SearchRow> rows_of(const FoundPlans& found, const Target& target);
/// The picture of the same plans.
SearchPicture picture_of(const FoundPlans& found, const Target& target);
/// The peak over both variables, where two vary and it is known as a function of them.
SearchPicture picture_of(const FitOfGpu& found);

}  // namespace oomdiag
