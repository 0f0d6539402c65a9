#pragma once

#include "extension/interpreter_shutdown.h"
#include "extension/record/python_api.h"

namespace oomdiag {

/// Whose GIL it is. Once, before any other of these.
void use_gil_of(const PythonApi& api) noexcept;

/// Holds the GIL where that is allowed: only on a thread that already has a Python thread state (else taking it may
/// deadlock: a thread that holds it may be joining us) and never once the interpreter ends, which ends those who wait for it.
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

/// Python begins to end, on this thread, which holds the GIL. Those who wait for it get it now, others do not wait any more.
void leave_gil_at_shutdown(const InterpreterShutdown& end) noexcept;

}  // namespace oomdiag
