#pragma once

#include <string>

namespace oomdiag {

/// The name of the first device that the CUDA driver shows; empty if there is none. Asked in a child process, so that neither
/// a driver's threads nor its crashes become ours; takes milliseconds without a driver, some 100 ms with one.
std::string name_of_real_gpu();

}  // namespace oomdiag
