#pragma once

#include "profiler/event.h"

namespace oomdiag {

/// Finds the interpreter that is in the process, if there is one, by its documented C API (3.11 to 3.14; no link to
/// libpython). Call once, with no lock held.
void attach_python() noexcept;
bool python_attached() noexcept;

/// Whether an exception of Python is on its way on this thread; false on threads that do not hold the GIL.
bool python_raises() noexcept;

/// Sets `source` to the user's line ("train.py:31": the innermost frame outside of site-packages and the standard library),
/// `inner_source` to the innermost line of a package other than torch inside of that, where there is one, and `module` to the
/// path of the torch.nn.Module whose forward runs. Does nothing on threads that Python does not know.
void locate_in_python(Context& context) noexcept;

/// Writes the stack of this thread's Python calls to the trace, as that of the refusal before. Does nothing on threads that
/// Python does not know.
void write_python_stack() noexcept;

/// To be called where a scope of PyTorch's optimizers begins: the optimizer is that of the innermost call.
void meet_optimizer() noexcept;

/// Writes which parameters, gradients and states belong to which parameter group, of all optimizers that were met; with
/// `refused` also for which group a step that runs on this thread was refused something. Milliseconds.
void write_parameter_groups(bool refused) noexcept;

/// Holds the GIL where that is allowed: only on a thread that already has a Python thread state (else taking it may
/// deadlock: a thread that holds it may be joining us) and never once the interpreter is finalising.
class GilScope {
 public:
  GilScope() noexcept;
  ~GilScope();
  GilScope(const GilScope&) = delete;
  GilScope& operator=(const GilScope&) = delete;

  bool held() const { return held_; }

 private:
  bool held_ = false;
  bool release_ = false;
  int state_ = 0;
};

}  // namespace oomdiag
