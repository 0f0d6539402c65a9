#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "profiler/trace/mapped_file.h"
#include "profiler/trace/trace.h"
#include "profiler/trace/writer.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;
namespace fs = std::filesystem;

namespace {

bool run(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

/// A small btrfs, or with `overlay` an overlay over it as in a container, for as long as this lives. `mixed`: what fills it leaves
/// no room for btrfs's own notes either.
class CopyOnWrite {
 public:
  CopyOnWrite(bool overlay, bool mixed) : place_(overlay ? at("overlay") : at("btrfs")) {
    for (const char* folder : {"btrfs", "lower", "overlay"}) fs::create_directory(at(folder));
    std::ofstream(at("image")).close();
    fs::resize_file(at("image"), 320 << 20);
    made_ = run("mkfs.btrfs -q " + std::string(mixed ? "--mixed " : "") + at("image").string()) &&
            run("mount -o loop " + at("image").string() + " " + at("btrfs").string());
    if (!made_ || !overlay) return;
    for (const char* folder : {"btrfs/upper", "btrfs/work"}) fs::create_directory(at(folder));
    made_ =
        run("mount -t overlay overlay -o lowerdir=" + at("lower").string() + ",upperdir=" + at("btrfs/upper").string() +
            ",workdir=" + at("btrfs/work").string() + " " + at("overlay").string());
  }
  ~CopyOnWrite() {
    run("umount -l " + at("overlay").string());
    run("umount -l " + at("btrfs").string());
  }

  bool made() const { return made_; }
  const fs::path& place() const { return place_; }

 private:
  fs::path at(const char* name) const { return folder_.path() / name; }

  TestFolder folder_;
  fs::path place_;
  bool made_ = false;
};

void write_out(const fs::path& place) { run("sync -f " + place.string()); }

void fill(const fs::path& place) {
  std::ofstream filler(place / "filler", std::ios::binary);
  const std::vector<char> some(64 << 10);
  while (filler.write(some.data(), static_cast<std::streamsize>(some.size())).flush()) {
  }
  write_out(place);
}

/// The status of a child that does this.
template <class Work>
int status_of(Work work) {
  const pid_t child = fork();
  if (child == 0) {
    work();
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

/// Stores into all of a file, has that written out, fills the disk, and stores again.
void overwrite_on_a_full_disk(const fs::path& place) {
  constexpr uint64_t kBytes = 256 << 10;  // each page takes milliseconds on a full disk
  MappedFile file(place / "trace", kBytes, kBytes);
  std::memset(file.at(0), 1, kBytes);
  msync(file.at(0), kBytes, MS_SYNC);
  fill(place);
  std::memset(file.at(0), 2, kBytes);
}

/// The same by a recorder, which goes round in its trace many times.
void record_on_a_full_disk(const fs::path& place) {
  TraceWriter writer(place / "trace", 1, {.event_bytes = 256 << 10, .chunk_bytes = 16 << 10, .slots_per_device = 1024});
  const auto write = [&](uint64_t first) {
    for (uint64_t i = first; i < first + 20'000; ++i) {
      Event event{.time = read_ticks(), .address = i % 500 * 512 + 512, .bytes = 512, .kind = EventKind::alloc};
      if (writer.write(event) != 0) writer.add_block(event);
    }
    writer.mark_time();
  };
  writer.publish();
  write(0);
  write_out(place);
  fill(place);
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  write(20'000);
  writer.finish();
}

}  // namespace

TEST_CASE("a full disk is no SIGBUS to who overwrites, also where pages are copied on write", "[trace]") {
  const CopyOnWrite disk(GENERATE(false, true), false);
  if (!disk.made()) {
    SUCCEED("no mkfs.btrfs, or no right to mount");
    return;
  }
  CHECK(status_of([&] { overwrite_on_a_full_disk(disk.place()); }) == 0);
}

TEST_CASE("a recording ends before the disk has no room for what copying pages takes, and can be read", "[trace]") {
  const CopyOnWrite disk(GENERATE(false, true), true);
  if (!disk.made()) {
    SUCCEED("no mkfs.btrfs, or no right to mount");
    return;
  }
  CHECK(status_of([&] { record_on_a_full_disk(disk.place()); }) == 0);
  const Trace trace = read_trace(disk.place() / "trace");
  CHECK(trace.events.size() > 1000);
  CHECK_THROWS(TraceWriter(disk.place() / "another", 1));
}
