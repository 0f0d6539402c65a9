// Fuzzing of everything that reads what comes from elsewhere: traces, memory snapshots, timelines, reports, device files, gzip. A reader
// may reject by Error(input); whatever else it throws, and whatever a sanitizer says, is a fault. Which one is chosen
// by OOMDIAG_FUZZ; scripts/fuzz builds and runs this.

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>

#include "extension/virtual_device/device_files/gpu.h"
#include "profiler/error.h"
#include "profiler/report/json/json.h"
#include "profiler/snapshot/packed.h"
#include "profiler/snapshot/snapshot.h"
#include "profiler/snapshot/timeline.h"
#include "profiler/snapshot/to_trace.h"
#include "profiler/trace/trace.h"
#include "profiler/trace/writer.h"
#include "tests/fuzz/made_snapshot.h"

namespace oomdiag {
namespace {

/// The input as a file, for readers that want one. Written anew each time, never closed.
std::filesystem::path file_of(std::string_view bytes) {
  static const int file = memfd_create("input", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, 0) != 0) std::abort();
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t count = pwrite(file, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (count <= 0) std::abort();
    done += static_cast<size_t>(count);
  }
  static const std::filesystem::path path = "/proc/self/fd/" + std::to_string(file);
  return path;
}

/// All of it is looked at, so that what was promised wrongly is found out.
uint64_t walk(const Trace& trace) {
  uint64_t seen = trace.initial.size() + trace.initial_layout.size() + trace.kept.size();
  for (auto at = trace.events.begin(); at != trace.events.end(); ++at) {
    seen += trace.name(at->detail).size() + trace.context(at->context).op + trace.step_of(at->sequence);
  }
  return seen;
}

void read_a_trace(std::string_view bytes) { walk(read_trace(file_of(bytes))); }
void read_a_snapshot(std::string_view bytes) { walk(to_trace(read_snapshot(file_of(bytes)))); }
void make_and_read_a_snapshot(std::string_view bytes) { read_a_snapshot(make_snapshot(bytes)); }
void read_a_timeline(std::string_view bytes) { read_timeline(file_of(bytes)); }
void read_a_report(std::string_view bytes) { from_json(std::string(bytes)); }
void read_a_gpu(std::string_view bytes) {
  try {
    read_gpu(file_of(bytes).string());
  } catch (const std::runtime_error&) {  // how that reader rejects
  }
}
void unpack(std::string_view bytes) { UnpackedFile{file_of(bytes)}; }

struct Target {
  std::string_view name;
  void (*run)(std::string_view);
};
constexpr std::array<Target, 7> kTargets = {{{"trace", read_a_trace},
                                             {"snapshot", read_a_snapshot},
                                             {"made_snapshot", make_and_read_a_snapshot},
                                             {"timeline", read_a_timeline},
                                             {"report", read_a_report},
                                             {"gpu", read_a_gpu},
                                             {"gzip", unpack}}};

const Target& chosen() {
  const char* const name = std::getenv("OOMDIAG_FUZZ");
  for (const Target& target : kTargets) {
    if (name != nullptr && target.name == name) return target;
  }
  std::abort();
}

/// A small trace as the recorder writes it, to begin with.
void write_seed(const std::filesystem::path& file) {
  std::filesystem::remove(file);  // of the run before
  TraceWriter writer(file, 2,
                     {.event_bytes = 2 << 12,
                      .chunk_bytes = 1 << 12,
                      .names_bytes = 1 << 12,
                      .contexts = 8,
                      .steps = 8,
                      .kept_events = 8,
                      .slots_per_device = 8});
  for (uint64_t i = 0; i < 100; ++i) {
    Event event{.address = 0x7f0000000000 + i % 7 * 512, .bytes = 512, .kind = EventKind::alloc};
    writer.write(event);
    writer.add_block(event);
  }
}

}  // namespace
}  // namespace oomdiag

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  if (const char* const seed = std::getenv("OOMDIAG_FUZZ_TRACE_SEED")) oomdiag::write_seed(seed);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const oomdiag::Target& target = oomdiag::chosen();
  try {
    target.run({reinterpret_cast<const char*>(data), size});
  } catch (const oomdiag::Error& error) {
    if (error.kind() != oomdiag::ErrorKind::input) throw;
  }
  return 0;
}
