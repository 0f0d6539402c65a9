#pragma once

// What the preload shim and the benchmarks call in the recorder, by name.

#define OOMDIAG_EXPORT extern "C" __attribute__((visibility("default")))

/// Once, when the recorder has been loaded: finds the Python interpreter, if there is one.
OOMDIAG_EXPORT void oomdiag_recorder_loaded();

/// Starts to record as soon as the caching allocator is ready. 1 when there is nothing more to wait for.
OOMDIAG_EXPORT int oomdiag_recorder_poll();

/// Begins a range of the user's own on this thread; null ends the innermost one.
OOMDIAG_EXPORT void oomdiag_recorder_range(const char* name);

/// Called by extension/python/module_names.py once torch.distributed knows it: launchers like mp.spawn set no RANK.
OOMDIAG_EXPORT void oomdiag_name_rank(int rank, int world_size);

/// For scripts/bench_overhead: 0 no op callbacks, 1 empty ones, 2 recording, 3 recording without the steady mode. Only once
/// recording has begun, and not while another thread runs ops.
OOMDIAG_EXPORT void oomdiag_recorder_measure(int callbacks);
