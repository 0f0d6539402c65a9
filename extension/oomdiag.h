#pragma once

// oomdiag from inside of a C++ program; link with liboomdiag.so. The same functions as torch.ops.oomdiag.*. Any thread.

#include <cstdint>
#include <map>
#include <string>

#define OOMDIAG_API __attribute__((visibility("default")))

namespace oomdiag {

/// Begins to record, or goes on after stop(), and says where the trace goes. `folder` is made if need be; empty: the folder
/// of `oomdiag run` if that started the program, else ./oomdiag-<pid>. Where CUDA was not used yet, recording begins with its
/// first use. What is allocated already is recorded as "before recording": its size is known, not its maker. Throws
/// oomdiag::Error, a std::runtime_error, as all of these do where nothing is recorded.
OOMDIAG_API std::string start(const std::string& folder = "");
/// Records nothing from here on. What was recorded stays, and can be asked for.
OOMDIAG_API void stop();
/// Names this place in the run. A report lists the marks with what was allocated there, and the peaks between them.
OOMDIAG_API void mark(const std::string& name);

/// The report so far, as JSON (oomdiag-report/1): what `oomdiag explain --json` gives. Reads the whole trace, which takes a
/// second for some million events.
OOMDIAG_API std::string report();
/// The same as text. After an OutOfMemoryError that was just caught it explains that error.
OOMDIAG_API std::string explain();
/// allocated_bytes, reserved_bytes, step and device of the highest peak so far.
OOMDIAG_API std::map<std::string, int64_t> peak();
/// What autograd keeps for backward at the failure, else at the peak: bytes by "who made it → who keeps it, shape".
OOMDIAG_API std::map<std::string, int64_t> saved_tensors();

}  // namespace oomdiag
