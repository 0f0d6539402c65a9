#include "extension/record/session.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <string>

#include "extension/cupti/collector.h"
#include "extension/record/allocator_hooks.h"
#include "extension/record/control.h"
#include "extension/record/op_callbacks.h"
#include "extension/record/python.h"
#include "extension/record/thread_state.h"
#include "extension/torch_version.h"
#include "profiler/error.h"

namespace oomdiag {

Session* the_session = nullptr;
std::atomic<bool> is_recording = false;

namespace {

enum class Stage { waiting, starting, settled };
std::atomic<Stage> stage = Stage::waiting;

void say(const char* what) noexcept {
  std::fprintf(stderr, "oomdiag: warning: not recording: %s; the program runs on\n", what);
}

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

int environment_number(const char* name, int otherwise) {
  const char* value = environment(name);
  return *value == '\0' ? otherwise : std::atoi(value);
}

template <size_t N>
void copy_text(char (&field)[N], const std::string& text) {
  std::strncpy(field, text.c_str(), N - 1);
}

// Arguments are separated by NUL in /proc.
std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), {});
  while (!text.empty() && text.back() == '\0') text.pop_back();
  for (char& c : text) {
    if (c == '\0') c = ' ';
  }
  return text;
}

// "trace" for the first process of a run, a name with its pid for those that it started.
std::filesystem::path trace_file() {
  const std::filesystem::path folder = environment("OOMDIAG_OUTPUT");
  const std::filesystem::path file = folder / "trace";
  return std::filesystem::exists(file) ? folder / ("trace-" + std::to_string(getpid())) : file;
}

void describe_device(TraceHeader& header, uint32_t index) {
  DeviceInfo& device = header.devices[index];
  const auto* properties = at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(index));
  copy_text(device.name, properties->name);
  device.total_bytes = static_cast<int64_t>(properties->totalGlobalMem);
  device.compute_major = properties->major;
  device.compute_minor = properties->minor;
  using ContextBytes = int64_t (*)(int);
  const auto modelled = reinterpret_cast<ContextBytes>(dlsym(RTLD_DEFAULT, "oomdiag_device_context_bytes"));
  if (modelled != nullptr) device.context_bytes = modelled(static_cast<int>(index));
  device.cublas_workspace_bytes = static_cast<int64_t>(at::cuda::getChosenWorkspaceSize());
}

void describe_process(TraceHeader& header) {
  const char* settings = environment("PYTORCH_CUDA_ALLOC_CONF");
  if (*settings == '\0') settings = environment("PYTORCH_ALLOC_CONF");
  copy_text(header.allocator_settings, settings);
  copy_text(header.torch_version, loaded_torch_version());
  copy_text(header.command, command_line());
  header.rank = environment_number("RANK", 0);
  header.world_size = environment_number("WORLD_SIZE", 1);
  header.python = python_attached() ? 1 : 0;
}

// The host looked at what a kernel should have written: which op, and where, tells whether a size or a branch hangs on it.
// In steady training ops are not watched: the learned steps have told it.
void write_read() {
  const ThreadState& state = thread_state();
  if (steady() && state.context.op == 0) return;
  Event event = state.event(EventKind::note);
  event.flags = kNoteRead;
  the_session->writer().write(event);
}

void write_note(const char* kind, const char* name) {
  if (!is_recording.load() || the_session == nullptr) return;
  if (std::string_view(kind) == "read") return write_read();
  TraceWriter& writer = the_session->writer();
  Context context;
  context.op = writer.intern(std::string_view(kind));
  Event event;
  event.kind = EventKind::note;
  event.time = read_ticks();
  event.context = writer.intern(context);
  event.detail = writer.intern(std::string_view(name));
  writer.write(event);
}

// The virtual device, where it is loaded, says what it answered by estimate or not at all.
bool listen_to_virtual_device() {
  using Observer = void (*)(const char*, const char*);
  const auto set = reinterpret_cast<void (*)(Observer)>(dlsym(RTLD_DEFAULT, "oomdiag_device_set_observer"));
  if (set != nullptr) set(write_note);
  return set != nullptr;
}

// A child of fork shares the mapping: if it went on writing, it would corrupt its parent's chunk.
bool in_child = false;
void stop_in_child() {
  in_child = true;
  stop_collecting_in_child();
  is_recording.store(false);
}

void finish() {
  if (in_child) return;
  write_memory_stats();
  the_session->writer().finish();
}

Event event_of_driver(EventKind kind) noexcept {
  const ThreadState* state = existing_thread_state();
  return state != nullptr ? state->event(kind) : Event{.time = read_ticks(), .kind = kind};
}

// Kineto of torch 2.11 needs CUPTI's only slot, which it gets a share of where the preloaded shim brings it to us; that of 2.15
// does without.
bool may_hold_cupti() {
  Dl_info found{};
  const void* subscribe = dlsym(RTLD_DEFAULT, "cuptiSubscribe");
  const bool shared = subscribe != nullptr && dladdr(subscribe, &found) != 0 &&
                      std::strstr(found.dli_fname, "liboomdiag_preload") != nullptr;
  int major = 0;
  int minor = 0;
  std::sscanf(loaded_torch_version().c_str(), "%d.%d", &major, &minor);
  return shared || major > 2 || minor >= 15;
}

void start_driver_books() {
  if (std::strcmp(environment("OOMDIAG_CUPTI"), "0") == 0 || *environment("OOMDIAG_OUTPUT") == '\0') return;
  start_collecting({.virtual_device = dlsym(RTLD_DEFAULT, "oomdiag_device_set_observer") != nullptr,
                    .may_hold_slot = may_hold_cupti(),
                    .with_stacks = *environment("OOMDIAG_DRIVER_STACKS") != '\0'});
}

void start() {
  const auto devices = static_cast<uint32_t>(at::cuda::device_count());
  TraceBudget budget;
  budget.event_bytes = int64_t{environment_number("OOMDIAG_TRACE_MIB", 256)} << 20;
  the_session = new Session(std::make_unique<TraceWriter>(trace_file(), devices, budget));
  TraceHeader& header = the_session->writer().header();
  describe_process(header);
  for (uint32_t d = 0; d < header.device_count; ++d) describe_device(header, d);
  the_session->device_count = header.device_count;
  the_session->several_devices = devices > 1;
  the_session->watch_outputs_above = header.devices[0].total_bytes / 2;
  header.virtual_device = dlsym(RTLD_DEFAULT, "oomdiag_device_set_observer") != nullptr ? 1 : 0;
  attach_allocator_hooks();
  the_session->writer().publish();
  pthread_atfork(nullptr, nullptr, stop_in_child);
  std::atexit(finish);
  const bool every_step = environment_number("OOMDIAG_EVERY_STEP", 0) != 0;
  install_op_callbacks(every_step ? OpCallbacks::every_step : OpCallbacks::recording);
  is_recording.store(true);
  listen_to_virtual_device();
  attach_collector(the_session->writer(), event_of_driver);
  if (const std::string why = why_not_collecting(); !why.empty()) {
    write_note("libraries that hold memory outside of PyTorch are not told apart", why.c_str());
  }
}

}  // namespace

bool settled() noexcept { return stage.load(std::memory_order_acquire) == Stage::settled; }

void poll() noexcept {
  auto* allocator = c10::cuda::CUDACachingAllocator::allocator.load();
  if (allocator == nullptr || !allocator->initialized()) return;
  Stage expected = Stage::waiting;
  if (!stage.compare_exchange_strong(expected, Stage::starting)) return;
  try {
    if (*environment("OOMDIAG_OUTPUT") != '\0') start();
  } catch (const std::exception& error) {
    say(error.what());
  }
  stage.store(Stage::settled, std::memory_order_release);
}

}  // namespace oomdiag

using namespace oomdiag;

void oomdiag_recorder_loaded() {
  attach_python();
  start_driver_books();
}

int oomdiag_recorder_poll() {
  poll();
  return settled() ? 1 : 0;
}

void oomdiag_recorder_range(const char* name) { enter_or_leave_range(name); }

void oomdiag_recorder_measure(int callbacks) {
  if (the_session == nullptr) return;
  install_op_callbacks(static_cast<OpCallbacks>(callbacks));
  is_recording.store(callbacks >= static_cast<int>(OpCallbacks::recording));
}
