#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "profiler/trace/writer.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;

namespace {

/// Who holds the first chunk, as the file says it.
uint32_t holder_of_first_chunk(const std::filesystem::path& file, TraceWriter& writer) {
  std::ifstream stream(file, std::ios::binary);
  stream.seekg(static_cast<std::streamoff>(writer.header().chunks_offset));
  uint64_t first_sequence = 0;
  uint32_t holder = 0;
  stream.read(reinterpret_cast<char*>(&first_sequence), sizeof first_sequence);
  stream.read(reinterpret_cast<char*>(&holder), sizeof holder);
  return holder;
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
  const TestFolder folder;
  TraceWriter writer(folder.path() / "trace", 1);
  Event event{.kind = EventKind::alloc};
  writer.write(event);
  REQUIRE(holder_of_first_chunk(folder.path() / "trace", writer) == 1);

  run_in_child([&] { writer.leave_to_parent(); });

  CHECK(holder_of_first_chunk(folder.path() / "trace", writer) == 1);
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
