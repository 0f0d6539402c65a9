#pragma once

#include <atomic>
#include <cstdint>

#include "extension/python_symbols.h"
#include "extension/record/python_api.h"

namespace oomdiag {

/// A call of a Python function, as the interpreter keeps it. Borrowed: to be compared, not to be followed without the GIL.
struct PythonCall {
  const char* code = nullptr;           ///< the code object
  const char* instruction = nullptr;    ///< within it
  const void* first_local = nullptr;    ///< `self` of a method
  const char* const* locals = nullptr;  ///< all of them, while the call runs, for `local_of`
};

/// The Python calls that run on the thread that asks, without the GIL and in nanoseconds, to distinguish one place of
/// the program from another where the GIL must not be taken. A thread that is in C++ changes none of its frames, and
/// nobody else does.
///
/// The interpreter's frames are no part of the C API. How they lie in memory is known of 3.11 to 3.14, and it is believed
/// only where what `measure` reads there is what the C API says.
class PythonFrames {
 public:
  /// A deeper stack is a framework's: its outer calls say nothing about an op.
  static constexpr int kMax = 96;

  /// Compares the frames that run with what the C API says of them. With the GIL. From then on they can be read.
  void measure(const PythonApi& api) noexcept;
  /// Whether they can.
  bool known() const noexcept { return known_.load(std::memory_order_acquire); }
  /// From here on none is read: the interpreter ends, and its threads with it.
  void forget() noexcept { known_.store(false, std::memory_order_release); }

  /// Calls `visit(call)` for the calls of this thread from the innermost outwards, as long as it returns true. Neither locks
  /// nor allocates.
  template <class Visit>
  void walk(const PythonApi& api, Visit visit) const noexcept {
    if (!known()) return;
    const Layout in = layout_;
    const Word* frame = current(static_cast<const Word*>(api.this_thread()));
    for (int depth = 0; frame != nullptr && depth < kMax; ++depth) {
      const Word* locals = frame + in.local;
      if (!visit(PythonCall{plain(frame[in.code]), frame[in.instruction], plain(*locals), locals})) return;
      frame = reinterpret_cast<const Word*>(frame[in.previous]);
    }
  }
  /// A variable of a running call of this thread: its own, then those that functions share, by cells. Borrowed; null where it has no
  /// value.
  static PythonObject local_of(const PythonCall& call, size_t index) noexcept {
    return const_cast<char*>(plain(call.locals[index]));
  }
  /// The offset of a call's instruction in its code, as PyCode_Addr2Line wants it.
  int offset_of(const PythonCall& call) const noexcept {
    return static_cast<int>(call.instruction - call.code - first_instruction_);
  }

 private:
  using Word = const char*;

  struct Layout {  // in words of a frame
    size_t code, previous, instruction, local;
  };
  /// 3.14 marks some of its pointers in the lowest bits.
  static Word plain(Word pointer) noexcept { return pointer - (reinterpret_cast<uintptr_t>(pointer) & 7); }
  const Word* current(const Word* thread) const noexcept {
    if (thread == nullptr) return nullptr;
    if (through_ == 0) return reinterpret_cast<const Word*>(thread[at_]);
    return reinterpret_cast<const Word*>(reinterpret_cast<const Word*>(thread[through_])[at_]);
  }
  bool find_current(const Word* thread, const Word* frame) noexcept;
  bool agrees(const PythonApi& api, const Word* frame, PythonObject object) noexcept;
  bool choose_layout() noexcept;

  std::atomic<bool> known_ = false;
  Layout layout_{};
  size_t through_ = 0;  ///< word of the thread state that leads to what holds the current frame; 0 = it does so itself
  size_t at_ = 0;       ///< word there
  intptr_t first_instruction_ = 0;  ///< from the code object
};

}  // namespace oomdiag
