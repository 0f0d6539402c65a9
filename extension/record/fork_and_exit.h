#pragma once

#include <atomic>

// What of the recorder runs in a forked child, and what while the process exits. All code of the recorder follows these two
// lists; code that is new there is added to them.
//
// In a forked child only the thread that called fork exists. A mutex that another thread held at that moment stays locked
// for ever, and the trace is the parent's. So in a child nothing of ours locks, waits, loads a library, takes the GIL or
// writes to the trace:
//
//   op callbacks, allocator hooks, NVTX ranges, notes of the virtual device    return at once: `recording()` is false
//   the end of an op that began before the fork (on_end)                       returns; its frame stays, nobody reads it
//   the end of a thread (thread_state.cpp)                                     returns; the state of the thread is leaked
//   atexit handlers of the process and of Python                               return
//   the death of a Python object that is known (object_table.h)                runs: maps only, guarded by the GIL
//   oomdiag.stop()                                                             returns
//   oomdiag.start(), report(), explain(), peak(), saved_tensors()              Error(usage)
//
// A child that was forked before recording began is a process of its own and may record: `in_forked_child()` is false there.
//
// A process exits in this order; other threads run, allocate and free until its end:
//
//   1. Python calls its atexit handlers: from then on other threads do not wait for the GIL (gil.h)
//   2. exit() destroys the thread_local objects of its thread: no code of ours may need one that has a destructor. A
//      ThreadState that is asked for later is made anew and leaked
//   3. exit() calls our handler, which writes PyTorch's totals: from here on `process_is_exiting()`
//   4. exit() destroys static objects, those of PyTorch too: nothing begins to record, no GIL is taken, the list of PyTorch's
//      callbacks stays as it is. Events are still written. The recorder has no static object with a destructor
namespace oomdiag {

namespace process_state {
inline std::atomic<bool> forked = false;
inline std::atomic<bool> exiting = false;
}  // namespace process_state

/// Whether this process is a fork of one that records. Any thread, any time; set by the handler of fork in the child.
inline bool in_forked_child() noexcept { return process_state::forked.load(std::memory_order_relaxed); }
/// Whether exit() has called our handler. Any thread, any time.
inline bool process_is_exiting() noexcept { return process_state::exiting.load(std::memory_order_relaxed); }

}  // namespace oomdiag
