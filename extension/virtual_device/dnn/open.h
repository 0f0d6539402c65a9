#pragma once

namespace oomdiag {

/// The real cuDNN, where it is loaded: as dlopen would give it, were that not interposed.
void* find_real_library();

}  // namespace oomdiag
