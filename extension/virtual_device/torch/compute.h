#pragma once

namespace oomdiag {

/// Begins to follow the contents of small tensors through PyTorch's operators.
void start_computing();

}  // namespace oomdiag
