#pragma once

#include "extension/record/python_api.h"

namespace oomdiag {

/// Says in the trace which rank of how many this process is, if torch.distributed knows it: launchers like mp.spawn set no
/// RANK. With the GIL.
void note_rank(const PythonApi& api);

}  // namespace oomdiag
