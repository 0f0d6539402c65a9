#pragma once

#include <string>

#include "profiler/export/picture.h"
#include "profiler/report/report.h"

namespace oomdiag {

/// Stacks and their bytes, one a line, for flame graphs (speedscope, flamegraph.pl): "activation;layers.*;mlp;aten::gelu 1024".
/// Together they are what is allocated.
std::string to_folded(const OwnerNode& owners);

/// Who holds the bytes in use, a row for each kind of holder and one for what has no name; RFC 4180. Of all GPUs.
std::string to_csv(const Report& report);

/// At most 40 lines for an issue or a chat.
std::string to_markdown(const Report& report);

}  // namespace oomdiag
