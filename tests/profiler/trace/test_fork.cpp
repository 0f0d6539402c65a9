#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "profiler/trace/trace.h"
#include "profiler/trace/writer.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;

namespace {

void write_many(TraceWriter& writer, uint64_t address, int count) {
  Event event{.address = address, .bytes = 1, .kind = EventKind::alloc};
  for (int i = 0; i < count; ++i) writer.write(event);
}

template <class Child>
void run_in_child(Child child) {
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    child();
    std::exit(0);  // runs the destructors of the thread, as a Python program does that ends by sys.exit()
  }
  int status = 0;
  REQUIRE(waitpid(pid, &status, 0) == pid);
  REQUIRE(status == 0);
}

}  // namespace

TEST_CASE("a child of fork that ends by exit() gives back no chunk of its parent", "[trace]") {
  const bool leaves = GENERATE(true, false);  // who holds a chunk stands in private memory: the child cannot even try
  const TestFolder folder;
  const std::filesystem::path file = folder.path() / "trace";
  TraceWriter writer(file, 1, {.event_bytes = 64 << 12, .chunk_bytes = 1 << 12, .slots_per_device = 64});
  write_many(writer, 1, 1);

  run_in_child([&] {
    if (leaves) writer.leave_to_parent();
  });

  std::thread([&] { write_many(writer, 7, 20'000); }).join();  // would take the chunk, were it free
  write_many(writer, 2, 1);
  writer.publish();
  const Trace trace = read_trace(file);
  CHECK(trace.events.back().address == 2);
  CHECK(trace.overwritten_events + trace.events.size() == 20'002);
}

TEST_CASE("exit handlers write, too: after the destructors of the thread that held a chunk", "[trace]") {
  const TestFolder folder;
  static TraceWriter* late = nullptr;  // of the child
  run_in_child([&] {
    late = new TraceWriter(folder.path() / "trace", 1);
    std::atexit([] {
      write_many(*late, 2, 1);
      late->publish();
      late->finish();
    });
    write_many(*late, 1, 1);
  });
  const Trace trace = read_trace(folder.path() / "trace");
  REQUIRE(trace.events.size() == 2);
  CHECK(trace.events.back().address == 2);
}

TEST_CASE("what a child of fork stores in the trace by mistake stays its own", "[trace]") {
  const TestFolder folder;
  TraceWriter writer(folder.path() / "trace", 1);

  run_in_child([&] {
    writer.leave_to_parent();
    writer.header().rank = 99;
    Event event{.kind = EventKind::alloc};
    if (writer.write(event) != 0) std::_Exit(1);
  });

  CHECK(writer.header().rank == 0);
}
