#pragma once

namespace oomdiag {

/// Whether the CUDA driver is there and shows at least one device. Asked in a child process, so that neither a driver's
/// threads nor its crashes become ours; takes milliseconds without a driver, some 100 ms with one.
bool has_real_gpu();

}  // namespace oomdiag
