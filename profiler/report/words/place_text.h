#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/report/words/text_options.h"

namespace oomdiag {

/// Adds "  where      <value>", unless there is none.
void add(std::string& text, std::string_view label, const std::string& value);

/// "in backward, step 3", or "before the first step".
std::string moment_text(Phase phase, uint32_t step);

/// "train.py:31" of "/home/me/project/train.py:31"; the JSON has the whole path.
std::string short_source(std::string_view source);

/// What a place or a block is called in few words: its name, module or operator.
std::string_view label_of(const Where& where);
std::string_view label_of(const LiveBlock& block);

/// "aten::relu ← relu1 ← train.py:31": those that are there, each at most `columns` wide.
std::string joined_by_arrows(const std::vector<std::string_view>& parts, bool unicode = true,
                             size_t columns = std::string::npos);

/// "ReluBackward0 ← aten::relu ← relu1 ← modeling.py:7 ← train.py:31", what is known of it.
std::string place_text(const ReportPeak& peak, const TextOptions& options);
std::string place_text(const ReportFailure& failure, const TextOptions& options);

/// Whether a C++ call is one of PyTorch's libraries or of the system's.
bool is_in_library(std::string_view call);

/// "from train.py:40 in main ← …": the user's calls that led to the line that the place ends with.
std::string callers_text(const ReportFailure& failure, const TextOptions& options);

/// One line for each place where requests failed and the program went on: what a library caught itself, which requests
/// of libraries to the driver failed, and what the program caught.
std::string ooms_text(const ReportOfDevice& device, const TextOptions& options);

}  // namespace oomdiag
