#pragma once

#include <string>
#include <string_view>

#include "profiler/export/picture.h"
#include "profiler/report/report.h"

namespace oomdiag {

/// Stacks and their bytes, one a line, for flame graphs (speedscope, flamegraph.pl): "activation;layers.*;mlp;aten::gelu 1024".
/// Together they are what is allocated.
std::string to_folded(const OwnerNode& owners);

/// A cell of RFC 4180, in quotes where it must be. What a spreadsheet would take for a formula is a text.
std::string csv_cell(std::string_view text);

/// Who holds the bytes in use, a row for each kind of holder and one for what has no name; RFC 4180. Of all GPUs.
std::string to_csv(const Report& report);

/// At most 40 lines for an issue or a chat.
std::string to_markdown(const Report& report);

}  // namespace oomdiag
