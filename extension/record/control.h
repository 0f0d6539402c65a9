#pragma once

#include <cstdint>
namespace oomdiag {

struct CuptiGate;

/// What the preload shim and the benchmarks call in the recorder. It is the only thing that they look up there: the recorder
/// is loaded for itself alone, since a library that is made global takes all that it needs, which is PyTorch and what that
/// brings, into the namespace of every library of the program.
struct RecorderFunctions {
  /// Once, when the recorder has been loaded: finds the Python interpreter, if there is one.
  void (*loaded)();
  /// Starts to record as soon as the caching allocator is ready. 1 when there is nothing more to wait for.
  int (*poll)();
  /// Begins a range of the user's own on this thread; null ends the innermost one.
  void (*range)(const char* name);
  /// For scripts/bench_overhead: 0 no op callbacks, 1 empty ones, 2 recording, 3 recording without the steady mode. Only once
  /// recording has begun, and not while another thread runs ops.
  void (*measure)(int callbacks);
  /// Who decides about the slot of CUPTI.
  const CuptiGate* (*cupti)();
};

inline constexpr const char* kRecorderLibrary = "liboomdiag.so";
inline constexpr const char* kRecorderFunctions = "oomdiag_recorder";

}  // namespace oomdiag
