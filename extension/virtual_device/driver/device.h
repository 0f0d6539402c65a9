#pragma once

#include <cuda.h>

#include "extension/launches.h"
#include "extension/virtual_device/entry_point.h"

// What libcuda.so.1 exports beside the driver API: what its sibling mocks need and the driver API does not offer, and
// what the recorder asks. Everything else between the mocks goes by the documented driver API, as in the real stack.

/// Calls `on_note` for each noted fact, those of the past at once: ("unsupported", a stubbed name that was called),
/// ("estimate", a name whose answer is an estimate), ("mode", a setting), ("settings", one that is not understood), each once; and, each time, ("read", "") when the
/// host looks at bytes that no host wrote. Called on the noting thread; null stops it. By this symbol the
/// recorder knows that the device is virtual.
OOMDIAG_ENTRY_POINT void oomdiag_device_set_observer(void (*on_note)(const char* kind, const char* name));

/// Notes a fact once per process. Both strings must live as long as the process.
OOMDIAG_ENTRY_POINT void oomdiag_device_note(const char* kind, const char* name);

/// Calls `on_oom` whenever a GPU has too little memory for what a library or the driver itself needs: a context, code,
/// a handle's workspace, a communicator's buffers, a graph. Called on the thread that asked, under no lock of ours;
/// null stops it.
OOMDIAG_ENTRY_POINT void oomdiag_device_set_oom_observer(void (*on_oom)(int device, int64_t bytes));

/// Calls `on_launch` at each, on the launching thread, before it is submitted; null stops it. Of a graph's launches it is
/// called for those that are captured, not for its replays. To be set before the kernel's code is loaded.
OOMDIAG_ENTRY_POINT void oomdiag_device_set_launch_observer(void (*on_launch)(const struct oomdiag_launch*));

/// Notes such a failed request on the current device.
OOMDIAG_ENTRY_POINT void oomdiag_device_note_oom(int64_t bytes);

/// Notes that the host reads what a kernel should have written.
OOMDIAG_ENTRY_POINT void oomdiag_device_note_read();

/// Work submitted to `stream`: the first charges the GPU with its kernels; a capturing stream gets a node of `type`.
OOMDIAG_ENTRY_POINT CUresult oomdiag_device_submit(CUstream stream, CUgraphNodeType type);

/// The same for a kernel of so many threads, or one that moves so many bytes of the GPU's memory and does so many
/// operations in 32 bits: what takes how long, where work takes time (clock.h).
OOMDIAG_ENTRY_POINT CUresult oomdiag_device_launch(CUstream stream, double threads);
OOMDIAG_ENTRY_POINT CUresult oomdiag_device_compute(CUstream stream, double memory_bytes, double flops);

/// The same for a kernel that takes `cycles` of the GPU's clock, whatever it does.
OOMDIAG_ENTRY_POINT CUresult oomdiag_device_spin(CUstream stream, int64_t cycles);

/// A library handle (cuBLAS, cuDNN) is made on the current device: it takes what a first kernel takes.
OOMDIAG_ENTRY_POINT CUresult oomdiag_device_use_library();

/// CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED where a capture forbids an unsafe call (allocation, synchronisation) on this thread.
OOMDIAG_ENTRY_POINT CUresult oomdiag_device_check_capture();

/// Copies between any two places, as far as contents are kept. No stream order: work is done at once. Neither place is checked.
OOMDIAG_ENTRY_POINT void oomdiag_device_copy(void* to, const void* from, size_t bytes);

/// Fills with a number of 1, 2, 4, 8 or 16 bytes; `is_guess`: a read is noted as one of what a kernel wrote.
OOMDIAG_ENTRY_POINT void oomdiag_device_fill_numbers(void* to, size_t bytes, const void* number, size_t number_bytes,
                                                     bool is_guess);

/// Whether all numbers there are one, which is written to `number`: 0 they differ, 1 known, 2 a guess, 3 bulk data of the host,
/// which was not kept, 4 not known. Waits for what is promised.
OOMDIAG_ENTRY_POINT int oomdiag_device_look(const void* from, size_t bytes, void* number, size_t number_bytes);

/// The next number of 1, 4 or 8 bytes that this thread reads from what no host wrote is `number`: a size or a truth that an
/// operator works out on the GPU and asks for. `is_known`: no read is noted. Negative: no more.
OOMDIAG_ENTRY_POINT void oomdiag_device_expect(int64_t number, bool is_known);

/// Above 0, what the kernels that this thread launches write is known by the operator that launches them; at 0 they may write
/// wherever they are given a pointer to. Gives what was set before.
OOMDIAG_ENTRY_POINT int oomdiag_device_set_known_kernels(int depth);

/// Whether work is being captured into a graph, which nothing does now.
OOMDIAG_ENTRY_POINT bool oomdiag_device_is_capturing();

/// The work that is being captured will overwrite the range, whenever the graph runs.
OOMDIAG_ENTRY_POINT void oomdiag_device_overwritten_at_replay(void* begin, size_t bytes);

/// Whether the host wrote all of it. Waits for what is promised.
OOMDIAG_ENTRY_POINT bool oomdiag_device_knows(const void* from, size_t bytes);

/// The same, and copies to the host what a look would show. The look is not noted.
OOMDIAG_ENTRY_POINT bool oomdiag_device_peek(void* to, const void* from, size_t bytes);

/// What the host would read there, had a kernel written it: a read is noted.
OOMDIAG_ENTRY_POINT void oomdiag_device_guess(void* to, const void* from, size_t bytes);

/// What is there will be known when somebody looks: `fetch` then fills in all bytes and is true, or false where a kernel
/// wrote them. It may wait, and is called once at most. `release` is called when nobody can ask any more.
OOMDIAG_ENTRY_POINT void oomdiag_device_promise(void* to, size_t bytes, bool (*fetch)(void* context, void* into),
                                                void (*release)(void* context), void* context);

/// What the host wrote there is forgotten: the block has a new owner.
OOMDIAG_ENTRY_POINT void oomdiag_device_forget(void* block, size_t bytes);

/// The same for what holds `at`, as far as it was written at once: a kernel was given a pointer to it.
OOMDIAG_ENTRY_POINT void oomdiag_device_forget_whole(const void* at);

/// Whether what the host writes is kept.
OOMDIAG_ENTRY_POINT bool oomdiag_device_keeps_contents();

/// From now on nothing that the host writes is kept: nobody can say when blocks change owners.
OOMDIAG_ENTRY_POINT void oomdiag_device_keep_no_contents();

/// A GPU of the machine as NVML sees it: by its place, whatever CUDA_VISIBLE_DEVICES shows.
struct oomdiag_gpu {
  const char* name;
  int64_t total_bytes;
  int64_t used_bytes;  ///< by all processes, contexts included
  int compute_major;
  int compute_minor;
  int clock_khz;
  bool is_linked;  ///< to others like it, by NVLink
  bool has_peers;  ///< others like it reach its memory
};

/// Fills `gpu`; false when there is none at that place. Makes no context.
OOMDIAG_ENTRY_POINT bool oomdiag_device_describe(int index, struct oomdiag_gpu* gpu);

/// The branch of the driver, as in 550; 0 = the newest.
OOMDIAG_ENTRY_POINT int oomdiag_device_driver_branch();

/// The processes that have a part of the GPU, this one first: fills at most `capacity` entries, returns how many there
/// are.
OOMDIAG_ENTRY_POINT int oomdiag_device_processes(int index, int* pids, int64_t* bytes, int capacity);

/// Whether machines with GPUs like `device` link them by NVLink.
OOMDIAG_ENTRY_POINT bool oomdiag_device_is_linked(int device);

/// Whether GPUs like `device` reach each other's memory.
OOMDIAG_ENTRY_POINT bool oomdiag_device_has_peers(int device);

/// The newest architecture built into the wheel that `device` runs, such as 86.
OOMDIAG_ENTRY_POINT int oomdiag_device_architecture(int device);

/// `device` as cuDNN wants it described (JSON); lives as long as the process. Null for no such device.
OOMDIAG_ENTRY_POINT const char* oomdiag_device_cudnn_description(int device);

/// What the GPU's data file says that `device` takes before PyTorch does: its context and the first kernel.
OOMDIAG_ENTRY_POINT int64_t oomdiag_device_context_bytes(int device);

/// Whether that process runs. One that has ended and was not waited for yet has no memory any more, and sends nothing.
OOMDIAG_ENTRY_POINT bool oomdiag_device_is_alive(int pid) noexcept;
