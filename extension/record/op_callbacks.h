#pragma once

namespace oomdiag {

/// Which callbacks run at every op; the others are for measuring.
enum class OpCallbacks { none, empty, recording };

/// Installs them for all threads, replacing what was installed. Not in a callback.
void install_op_callbacks(OpCallbacks which);

/// Switches the callback that remembers the newest outputs on or off. It is the costlier half (PyTorch boxes the outputs
/// of every op), so it runs only where an OOM in forward is near. Any thread, also inside callbacks.
void watch_outputs(bool on);

}  // namespace oomdiag
