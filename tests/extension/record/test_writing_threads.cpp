#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "extension/record/intern_cache.h"
#include "profiler/trace/trace.h"
#include "profiler/trace/writer.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

// What the threads of a training program do to a trace all at once. For the sanitizers above all.

using namespace oomdiag;

namespace {

constexpr TraceBudget kTight{.event_bytes = 32 << 12,
                             .chunk_bytes = 1 << 12,
                             .names_bytes = 1 << 14,
                             .contexts = 256,
                             .steps = 64,
                             .kept_events = 64,
                             .slots_per_device = 256};

/// The caching allocator, as far as the recorder sees it: events are written under one lock a GPU.
struct Allocator {
  TraceWriter& writer;
  std::mutex mutex{};

  void alloc(uint64_t address) {
    const std::lock_guard lock(mutex);
    Event event{.address = address, .bytes = 512, .context = 1, .kind = EventKind::alloc};
    if (writer.write(event) != 0) writer.add_block(event);
  }
  void free(uint64_t address) {
    const std::lock_guard lock(mutex);
    Event event{.address = address, .bytes = 512, .kind = EventKind::free_requested};
    writer.write(event);
    writer.remove_block(0, address, event.sequence);
    writer.complete_last_free(0, address);
  }
};

/// Ops, scopes, names and late places, as the callbacks write them; its blocks are distinguished by `thread`.
void work(Allocator& allocator, uint64_t thread, int rounds) {
  TraceWriter& writer = allocator.writer;
  InternCache names(writer);
  std::mt19937 random(static_cast<unsigned>(thread));
  for (int i = 0; i < rounds; ++i) {
    const uint64_t address = thread << 20 | static_cast<uint64_t>(i + 1) << 9;
    allocator.alloc(address);
    if (random() % 8 == 0) {
      const Context place{.op = names.name("op " + std::to_string(random() % 300)),
                          .source = static_cast<uint32_t>(thread)};
      Event* written = writer.last_written();
      if (written != nullptr) writer.place(written, written->sequence, names.context(place));
    }
    if (random() % 4 != 0) allocator.free(address);
    if (random() % 32 == 0) {
      Event kept{.address = address, .kind = EventKind::parameter};
      writer.write_and_keep(kept);
    }
    if (random() % 64 == 0) writer.end_step(writer.header().last_sequence.load()), writer.mark_time();
  }
}

}  // namespace

TEST_CASE("long and short threads write one trace, and it is whole", "[record][threads]") {
  const TestFolder folder;
  TraceWriter writer(folder.path() / "trace", 1, kTight);
  Allocator allocator{writer};
  {
    std::vector<std::jthread> threads;
    for (uint64_t t = 1; t <= 3; ++t) threads.emplace_back([&, t] { work(allocator, t, 2000); });
    for (uint64_t t = 10; t < 90; ++t) std::jthread([&, t] { work(allocator, t, 20); });  // one after the other
  }
  writer.publish();
  const Trace trace = read_trace(folder.path() / "trace");
  CHECK(trace.events.size() > 500);
  CHECK(trace.overwritten_events > 0);
  CHECK(writer.header().failure[0] == '\0');
}

TEST_CASE("children of fork, while other threads write, disturb nothing", "[record][threads]") {
#ifdef __SANITIZE_THREAD__
  SUCCEED("ThreadSanitizer knows no forks of programs with threads");
#else
  const TestFolder folder;
  TraceWriter writer(folder.path() / "trace", 1, kTight);
  Allocator allocator{writer};
  std::atomic<bool> done = false;
  std::jthread other([&] {
    for (uint64_t t = 1; !done.load(); ++t) work(allocator, t, 50);
  });
  for (int i = 0; i < 20; ++i) {
    allocator.alloc(uint64_t{1} << 60);
    const pid_t child = fork();
    if (child == 0) {
      writer.leave_to_parent();
      Event event{.kind = EventKind::alloc};
      const bool wrote = writer.write(event) != 0 || writer.on();
      _exit(wrote ? 1 : 0);
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(status == 0);
    allocator.free(uint64_t{1} << 60);
  }
  done = true;
  other.join();
  CHECK(writer.on());
  writer.publish();
  CHECK(read_trace(folder.path() / "trace").events.size() > 0);
#endif
}

TEST_CASE("a disk that fills up while threads write ends the recording, and nothing else", "[record][threads]") {
  const TestFolder folder;
  if (mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=300k") != 0) {
    SUCCEED("no right to mount a file system");
    return;
  }
  {
    TraceWriter writer(folder.path() / "trace", 1,
                       {.event_bytes = 4 << 20,
                        .chunk_bytes = 16 << 10,
                        .names_bytes = 1 << 14,
                        .contexts = 256,
                        .steps = 64,
                        .kept_events = 64,
                        .slots_per_device = 1024});
    Allocator allocator{writer};
    {
      std::vector<std::jthread> threads;
      for (uint64_t t = 1; t <= 4; ++t) threads.emplace_back([&, t] { work(allocator, t, 4000); });
    }
    CHECK_FALSE(writer.on());
    CHECK(std::string(writer.header().failure).find("disk") != std::string::npos);
    writer.publish();
    CHECK(read_trace(folder.path() / "trace").events.size() > 100);
  }
  CHECK(umount2(folder.path().c_str(), MNT_DETACH) == 0);
}
