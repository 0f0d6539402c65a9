#pragma once

#include <filesystem>

namespace oomdiag {

/// Watches every operator with its inputs and outputs from here to the end of the process, which costs time: only in a run
/// that is made for it (OOMDIAG_METER). Writes `file` at exit, a line for each operator, step, phase and set of shapes:
///
///   step TAB phase TAB operator TAB calls TAB inputs '>' outputs
///
/// with values apart by blanks: a tensor as dtype:bytes of an element:sizes by 'x', a number or bool as "i:5", bools as
/// "m:110", anything else as "-". Told are operators that call no other, and whole convolutions, whose parts depend on the
/// machine; views are not. Steps end with those of PyTorch's optimizers. Call it once.
void start_work_meter(const std::filesystem::path& file);

}  // namespace oomdiag
