#pragma once

#include "extension/interpreter_shutdown.h"
#include "extension/record/cache_table.h"
#include "extension/record/gil.h"
#include "extension/record/python_api.h"
#include "extension/record/python_frames.h"
#include "profiler/event.h"

namespace oomdiag {

/// Finds the interpreter that is in the process, if there is one, by its documented C API (3.11 to 3.14; no link to
/// libpython). Call once, with no lock held.
void attach_python() noexcept;
bool python_attached() noexcept;
/// Its functions; null where there is none.
const PythonApi* python_api() noexcept;

/// Whether an exception of Python is on its way on this thread; false on threads that do not hold the GIL.
bool python_raises() noexcept;

/// The places of the program that a thread has come by, as `locate_in_python` found them.
struct KnownPlaces {
  struct Place {
    uint64_t mark = 0;  ///< mark_of_python_calls(); 0 = nothing is known
    uint32_t source = 0, inner_source = 0, module = 0;
  };
  CacheTable<Place> by_mark;
};

/// Sets `source` to the user's line ("train.py:31": the innermost frame outside of site-packages and the standard library),
/// `inner_source` to the innermost line of a package other than torch inside of that, where there is one, and `module` to the
/// path of the torch.nn.Module whose forward runs. Does nothing on threads that Python does not know. A place that this
/// thread knows costs tens of nanoseconds, and no GIL.
void locate_in_python(Context& context, KnownPlaces& places) noexcept;

/// Whether one place of the program can be distinguished from another without the GIL, or Python has no part in it.
bool python_calls_are_distinguished() noexcept;
/// A hash of what `locate_in_python` would look at: the calls from the innermost one to that of the user's line, and the module
/// whose forward runs. Where a module or code has died another one may lie, so the hashes of all places are others from then on. 0
/// where no Python runs on this thread. Tens of nanoseconds, also inside the allocator.
uint64_t mark_of_python_calls() noexcept;
/// Python begins to end, on this thread: as in gil.h, and no call is looked at without the GIL.
void on_interpreter_shutdown(const InterpreterShutdown& end) noexcept;

/// The Python calls of a moment in which the GIL could not be taken.
struct PythonCalls {
  PythonCall calls[PythonFrames::kMax];
  int depth = 0;
  uint64_t newest_code = 0;  ///< ProgramCode::newest() of that moment

  void capture() noexcept;
};
/// `locate_in_python` of such a moment. Says nothing of functions that were never looked at with the GIL.
void locate_in_python(Context& context, const PythonCalls& then) noexcept;

/// Writes the stack of this thread's Python calls to the trace, as that of the OOM before. Does nothing on threads that
/// Python does not know.
void write_python_stack() noexcept;

/// Writes which variables of the program refer to its tensors on GPUs. Where the interpreter begins to shut down, with the GIL.
/// At most half a second.
void write_tensor_referrers() noexcept;

/// To be called where a scope of PyTorch's optimizers begins: the optimizer is that of the innermost call.
void register_optimizer() noexcept;

/// Writes which parameters, gradients and states belong to which parameter group, of all registered optimizers; with
/// `at_oom`: also for which group a step that runs on this thread made the failed request. Milliseconds.
void write_parameter_groups(bool at_oom) noexcept;

}  // namespace oomdiag
