#pragma once

#include <string>
#include <string_view>

#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/report/words/text_options.h"

namespace oomdiag {

/// "activations (saved for backward)": what people read for a category, the same word everywhere.
std::string_view label_of(Category category);

/// "h.*.mlp.act ×12  train.py:31": what no module names is named by its line; count and shape follow where they fit.
std::string label_of(const ReportHolder& holder, const TextOptions& options, size_t columns);

/// "h.*.mlp.act ×12, 4.00 GiB: activations (saved for backward)": who keeps most; in a leak, what grows. Empty for nothing.
std::string kept_by_text(const ReportOfDevice& device, const TextOptions& options);

/// "kept by", or "grows" where what grows is reported and its holder is not known.
std::string kept_by_label(const ReportOfDevice& device);

/// GPU memory by category in at most `at_most` rows, the smallest as "others"; adds up to the device.
std::string memory_table(const ReportOfDevice& device, size_t at_most, const TextOptions& options);

/// GPU memory by category, with bars; adds up to the device. Under each category that matters stand those who hold most of it, until
/// four fifths are named.
std::string holders_table(const ReportOfDevice& device, const TextOptions& options);

/// The lines that hold most, where there are several; empty else.
std::string lines_table(const ReportOfDevice& device);

}  // namespace oomdiag
