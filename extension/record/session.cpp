#include "extension/record/session.h"

#include <ATen/SequenceNumber.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "extension/cupti/collector.h"
#include "extension/environment.h"
#include "extension/interpreter_shutdown.h"
#include "extension/python_build.h"
#include "extension/record/allocator_hooks.h"
#include "extension/record/control.h"
#include "extension/record/fork_and_exit.h"
#include "extension/record/internal_names.h"
#include "extension/record/layout.h"
#include "extension/record/native_stack.h"
#include "extension/record/op_arguments.h"
#include "extension/record/op_callbacks.h"
#include "extension/record/process_facts.h"
#include "extension/record/python.h"
#include "extension/record/steady.h"
#include "extension/record/thread_state.h"
#include "extension/record/trace_place.h"
#include "extension/record/waiting.h"
#include "extension/record/work_meter.h"
#include "extension/torch_version.h"
#include "extension/write_status.h"
#include "profiler/error.h"
#include "profiler/event.h"
#include "profiler/trace/format.h"
#include "profiler/trace/ticks.h"
#include "profiler/trace/writer.h"

namespace oomdiag {

Session* the_session = nullptr;
std::atomic<bool> is_recording = false;

std::string_view Session::canonical_name(std::string_view name) {
  const std::string_view canonical = scope_names_.canonical_name(name);
  if (canonical != name) writer().header().folded_names.fetch_add(1, std::memory_order_relaxed);
  return canonical;
}

namespace {

enum class Stage { waiting, starting, settled };
std::atomic<Stage> stage = Stage::waiting;
std::mutex beginning;  // one thread begins, stops or goes on at a time
bool is_retired = false;

// Leaked: a thread may ask for it while static objects are destroyed.
RecordingOptions& wish() {
  static auto* const instance = new RecordingOptions;
  return *instance;
}

void say(const char* what) noexcept try {
  write_status(std::string("recording could not begin: ") + what);
  std::fprintf(stderr, "oomdiag: warning: not recording: %s; the program runs on\n", what);
} catch (...) {
}

bool allocator_is_ready() noexcept {
  auto* allocator = c10::cuda::CUDACachingAllocator::allocator.load();
  return allocator != nullptr && allocator->initialized();
}

// The host looked at what a kernel should have written: which op, and where, decides whether a size or a branch hangs
// on it.
void write_read() {
  if (!recording()) return;
  ThreadState& state = thread_state();
  Event event = state.event(EventKind::note);
  event.flags = kNoteRead;
  write_in_step(&state, event);
}

void wish_from_environment() {
  if (!wish().folder.empty()) return;
  wish() = {.folder = variables::text(variables::kOutput),
            .attach_at_step = static_cast<int>(variables::number(variables::kAttachAtStep, 1))};
}

// The virtual device, where it is loaded, says what it answered by estimate or not at all.
void listen_to_virtual_device() {
  using Observer = void (*)(const char*, const char*);
  const auto set = reinterpret_cast<void (*)(Observer)>(dlsym(RTLD_DEFAULT, "oomdiag_device_set_observer"));
  if (set == nullptr) return;
  set([](const char* kind, const char* name) {
    std::string_view(kind) == "read" ? write_read() : write_note(kind, name);
  });
  using OomObserver = void (*)(int, int64_t);
  const auto set_oom_observer =
      reinterpret_cast<void (*)(OomObserver)>(dlsym(RTLD_DEFAULT, "oomdiag_device_set_oom_observer"));
  if (set_oom_observer != nullptr) set_oom_observer(note_library_oom);
}

// A recording that another thread was about to begin is not finished by anybody: such a child does not record either.
bool was_beginning_at_fork() {
  if (stage.load() == Stage::starting) return true;
  if (!beginning.try_lock()) return true;
  beginning.unlock();
  return false;
}

// A child of fork owns nothing: the trace and its chunks stay the parent's, however the child ends.
void stop_in_child() {
  if (the_session == nullptr && !was_beginning_at_fork()) return;
  process_state::forked.store(true);
  is_recording.store(false);
  stop_collecting_in_child();
  if (the_session != nullptr) the_session->writer().leave_to_parent();
}
// As soon as the library is loaded: a child may be forked while the recording begins.
[[maybe_unused]] const bool forks_are_watched = pthread_atfork(nullptr, nullptr, stop_in_child) == 0;

void finish() {
  if (in_forked_child()) return;
  process_state::exiting.store(true);
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
  if (std::strcmp(variables::text(variables::kCupti), "0") == 0 || *variables::text(variables::kOutput) == '\0') return;
  start_collecting({.virtual_device = dlsym(RTLD_DEFAULT, "oomdiag_device_set_observer") != nullptr,
                    .may_hold_slot = may_hold_cupti(),
                    .with_stacks = *variables::text(variables::kDriverStacks) != '\0'});
}

Session& make_session(uint32_t steps_before) {
  const auto devices = static_cast<uint32_t>(c10::cuda::device_count());
  TraceBudget budget;
  const int64_t mib = variables::number(variables::kTraceMib, variables::kUsualTraceMib);
  budget.event_bytes = std::clamp<int64_t>(mib, 0, variables::kMaxTraceMib) << 20;
  PlacedTrace placed = place_trace(wish().folder, devices, budget);
  auto* session = new Session(std::move(placed.writer), std::move(placed.file));
  TraceHeader& header = session->writer().header();
  describe_process(header);
  header.steps_before = steps_before;
  session->device_count = header.device_count;
  for (uint32_t d = 0; d < header.device_count; ++d)
    session->watch_outputs_above[d] = header.devices[d].total_bytes / 2;
  return *session;
}

void note_interpreter_shutdown(const InterpreterShutdown& end) noexcept {
  if (in_forked_child()) return;
  if (recording() && (the_session->described_ooms > 0 || the_session->steps().may_grow())) {
    write_tensor_referrers();
  }
  the_session->writer().header().python_ended.store(1);
  on_interpreter_shutdown(end);
}

/// In steady training operators are not watched, and their shapes are needed.
bool is_metered() { return variables::is_on(variables::kMeter); }
bool keeps_arguments() { return variables::is_on(variables::kArguments); }

void watch_program() {
  const bool every_step = variables::is_on(variables::kEveryStep) || is_metered() || keeps_arguments();
  install_op_callbacks(every_step ? OpCallbacks::every_step : OpCallbacks::recording);
}

void begin(uint32_t steps_before) {
  if (in_forked_child() || process_is_exiting()) return;
  const std::lock_guard lock(beginning);
  if (the_session != nullptr) return;
  Session& session = make_session(steps_before);
  const char* obstacle = find_allocator_obstacle();
  session.writer().header().unwatched = obstacle != nullptr ? 1 : 0;
  the_session = &session;
  NativeStack().capture();  // the first one loads a library, which must not happen under the allocator's lock
  if (obstacle == nullptr) attach_allocator_hooks();
  session.writer().publish();
  std::atexit(finish);
  if (python_attached()) call_at_interpreter_shutdown<note_interpreter_shutdown>();
  watch_program();
  if (is_metered()) {
    start_work_meter(the_session->trace().parent_path() / kWorkFile);
    start_launch_meter();
  }
  if (keeps_arguments()) start_op_arguments(the_session->trace().parent_path() / kArgumentsFile);
  is_recording.store(true);
  check_internal_names();
  if (obstacle == nullptr) write_beginning();
  if (obstacle != nullptr) write_note("not watched", obstacle);
  listen_to_virtual_device();
  attach_collector(the_session->writer(), event_of_driver);
  if (const std::string why = why_not_collecting(); !why.empty()) {
    write_note("libraries that hold non-PyTorch memory are not distinguished", why.c_str());
  }
}

void resume() {
  Session& session = *the_session;
  if (!session.writer().on()) throw Error(ErrorKind::environment, "recording had failed and cannot go on");
  thread_state().next_node = at::sequence_number::peek();  // nodes made meanwhile have no op that we saw
  watch_program();
  is_recording.store(true);
  if (session.writer().header().unwatched == 0) write_beginning();
  listen_to_virtual_device();  // it says again what it noted meanwhile
}

void note_loaded() {
  attach_python();
  start_driver_books();
}

void measure_callbacks(int callbacks) {
  if (the_session == nullptr) return;
  install_op_callbacks(static_cast<OpCallbacks>(callbacks));
  is_recording.store(callbacks >= static_cast<int>(OpCallbacks::recording));
}

// A folder that nobody named may be one that somebody else has put there.
std::filesystem::path make_default_folder() {
  auto folder = std::filesystem::absolute("oomdiag-" + std::to_string(getpid()));
  std::error_code ignored;
  if (!make_trace_folder(folder) && std::filesystem::exists(folder, ignored)) {
    throw Error(ErrorKind::environment, "'" + folder.string() + "' is there, and others may write into it",
                "name a folder: oomdiag.start(\"DIR\")");
  }
  return folder;
}

std::filesystem::path choose_folder(const std::filesystem::path& asked) {
  wish_from_environment();
  if (asked.empty() && wish().folder.empty()) return make_default_folder();
  auto folder = asked.empty() ? wish().folder : std::filesystem::absolute(asked);
  make_trace_folder(folder);
  return folder;
}

// Of a recording that waits for CUDA. That of `oomdiag run` stays: it is in the environment.
void drop_wish() noexcept {
  Stage expected = Stage::waiting;
  if (!stage.compare_exchange_strong(expected, Stage::starting)) return;
  wish() = {};
  stage.store(Stage::waiting);
}

/// Whether this note was not written before: the virtual device says all of its notes whenever a recording goes on.
bool is_new_note(uint32_t kind, uint32_t text) {
  static auto& lock = *new std::mutex;
  static auto& written = *new std::set<std::pair<uint32_t, uint32_t>>;
  const std::lock_guard guard(lock);
  return written.emplace(kind, text).second;
}

}  // namespace

bool settled() noexcept { return stage.load(std::memory_order_acquire) == Stage::settled; }

void poll() noexcept {
  if (!allocator_is_ready()) return;
  Stage expected = Stage::waiting;
  if (!stage.compare_exchange_strong(expected, Stage::starting)) return;
  try {
    wish_from_environment();
    if (wish().attach_at_step > 1) {
      wait_for_step(wish().attach_at_step);
    } else if (!wish().folder.empty()) {
      begin(0);
    }
  } catch (const std::exception& error) {
    say(error.what());
  }
  stage.store(Stage::settled, std::memory_order_release);
}

void start_at_step(uint32_t steps_before) noexcept try { begin(steps_before); } catch (const std::exception& error) {
  say(error.what());
}

void retire() noexcept {
  is_retired = true;
  stage.store(Stage::settled);
}

std::filesystem::path start_recording(const std::filesystem::path& folder) {
  if (is_retired) throw Error(ErrorKind::usage, "this copy of liboomdiag.so has no effect; see its warning");
  if (python_is_free_threaded()) throw Error(ErrorKind::environment, kFreeThreaded);
  check_not_forked();
  if (the_session != nullptr) {
    const std::lock_guard lock(beginning);
    if (!is_recording.load()) resume();
    return the_session->trace();
  }
  wish() = {.folder = choose_folder(folder), .attach_at_step = 1};
  if (allocator_is_ready()) {
    begin(0);
    stage.store(Stage::settled, std::memory_order_release);
    return the_session->trace();
  }
  stage.store(Stage::waiting, std::memory_order_release);
  wait_in_ops();
  return wish().folder / "trace";
}

bool recording_is_wanted() noexcept {
  if (the_session != nullptr) return is_recording.load();
  return !wish().folder.empty() || *variables::text(variables::kOutput) != '\0';
}

void check_not_forked() {
  if (in_forked_child()) {
    throw Error(ErrorKind::usage, "this process is a fork of one that records, which it would disturb",
                "record in a process of its own: subprocess, or multiprocessing's \"spawn\"");
  }
}

void stop_recording() noexcept {
  if (in_forked_child()) return;
  const std::lock_guard lock(beginning);
  if (the_session == nullptr) return drop_wish();
  if (!is_recording.load()) return;
  write_memory_stats();
  is_recording.store(false);
  install_op_callbacks(OpCallbacks::none);
  the_session->writer().mark_time();
}

void write_note(std::string_view kind, const char* name) noexcept try {
  if (!is_recording.load() || the_session == nullptr) return;
  const bool is_mark = kind == kMark;
  TraceWriter& writer = the_session->writer();
  Context context;
  context.op = writer.intern(kind);
  Event event;
  event.kind = EventKind::note;
  event.time = read_ticks();
  event.context = writer.intern(context);
  event.detail = writer.intern(is_mark ? the_session->canonical_name(name) : std::string_view(name));
  // Of marks there may be any number; what stands in the report's limits is said once and must outlast them.
  if (is_mark) {
    writer.write(event);
  } else if (is_new_note(context.op, static_cast<uint32_t>(event.detail))) {
    writer.write_and_keep(event);
  }
} catch (...) {
}

}  // namespace oomdiag

extern "C" __attribute__((visibility("default"))) const oomdiag::RecorderFunctions oomdiag_recorder{
    .loaded = [] { oomdiag::note_loaded(); },
    .poll = [] { return oomdiag::poll(), oomdiag::settled() ? 1 : 0; },
    .range = [](const char* name) { oomdiag::enter_or_leave_range(name); },
    .measure = [](int callbacks) { oomdiag::measure_callbacks(callbacks); },
    .cupti = [] { return oomdiag::cupti_gate(); }};
