#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "profiler/trace/shared_file.h"
#include "profiler/trace/ticks.h"
#include "profiler/trace/trace.h"
#include "profiler/trace/writer.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;
namespace fs = std::filesystem;

namespace {

bool run(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

/// A small btrfs, or with `overlay` an overlay over it as in a container, for as long as this lives. `mixed`: what fills it leaves
/// no space for btrfs's own notes either.
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

/// From here on the kernel is one before 5.14, which does not know MADV_POPULATE_WRITE. For children: it stays so.
void become_older_kernel() {
  constexpr uint32_t kNumber = offsetof(seccomp_data, nr),
                     kAdvice = offsetof(seccomp_data, args) + 2 * sizeof(uint64_t);
  sock_filter rules[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kNumber),
                         BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
                         BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kAdvice),
                         BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MADV_POPULATE_WRITE, 0, 1),
                         BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
                         BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program{.len = sizeof rules / sizeof rules[0], .filter = rules};
  const bool is_set =
      prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
  if (!is_set) _exit(100);
}

/// In a child whose kernel is a new or an old one: whether `holds` holds there.
template <class Claim>
bool holds_in_child(bool is_older_kernel, Claim holds) {
  return status_of([&] {
           if (is_older_kernel) become_older_kernel();
           if (!holds()) _exit(1);
         }) == 0;
}

/// A tmpfs of so many KiB, for as long as this lives.
class SmallDisk {
 public:
  explicit SmallDisk(int kib)
      : made_(run("mount -t tmpfs -o size=" + std::to_string(kib) + "k tmpfs " + folder_.path().string())) {}
  ~SmallDisk() { run("umount -l " + folder_.path().string()); }

  bool made() const { return made_; }
  const fs::path& place() const { return folder_.path(); }

 private:
  TestFolder folder_;
  bool made_;
};

/// The descriptors of this process that are open on a file.
int count_descriptors(const fs::path& file) {
  int count = 0;
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    count += fs::read_symlink(entry, ignored) == file ? 1 : 0;
  }
  return count;
}

std::string text_of(const fs::path& file) {
  std::ifstream stream(file);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// Stores into all of a file, has that written out, fills the disk, and stores again.
void overwrite_on_a_full_disk(const fs::path& place) {
  constexpr uint64_t kBytes = 256 << 10;  // each page takes milliseconds on a full disk
  SharedFile file(place / "trace", kBytes, SharedFile::Opening::create);
  if (file.reserve(0, kBytes) != DiskSpace::enough) _exit(1);
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
  const bool is_older_kernel = GENERATE(false, true);
  CHECK(holds_in_child(is_older_kernel, [&] {
    overwrite_on_a_full_disk(disk.place());
    return true;
  }));
}

TEST_CASE("a recording ends before the disk has no space for what copying pages takes, and can be read", "[trace]") {
  const CopyOnWrite disk(GENERATE(false, true), true);
  if (!disk.made()) {
    SUCCEED("no mkfs.btrfs, or no right to mount");
    return;
  }
  const bool is_older_kernel = GENERATE(false, true);
  CHECK(holds_in_child(is_older_kernel, [&] {
    record_on_a_full_disk(disk.place());
    return true;
  }));
  const Trace trace = read_trace(disk.place() / "trace");
  CHECK(trace.events.size() > 1000);
  CHECK_THROWS(TraceWriter(disk.place() / "another", 1));
}

TEST_CASE("no descriptor of a shared file is open once it is mapped, and while one is its number is no low one",
          "[trace]") {
  const TestFolder folder;
  const fs::path path = fs::canonical(folder.path()) / "file";
  SharedFile file(path, host_page_bytes(), SharedFile::Opening::create);
  REQUIRE(file);
  CHECK(count_descriptors(path) == 0);
  CHECK(file.reserve(0, host_page_bytes()) == DiskSpace::enough);
  CHECK(count_descriptors(path) == 0);
  CHECK(holds_in_child(false, [&] {
    close(STDIN_FILENO);
    const FileDescriptor again = file.open_again();
    return again.number() > STDERR_FILENO && fcntl(STDIN_FILENO, F_GETFD) < 0;
  }));
}

TEST_CASE("a store on a full disk is an error and no signal, on any kernel", "[trace]") {
  const SmallDisk disk(64);
  if (!disk.made()) {
    SUCCEED("no right to mount");
    return;
  }
  const bool is_older_kernel = GENERATE(false, true);
  CHECK(holds_in_child(is_older_kernel, [&] {
    SharedFile file(disk.place() / "file", 1 << 20, SharedFile::Opening::create);
    const std::vector<char> some(8 * host_page_bytes(), 'x');
    uint64_t stored = 0;
    while (stored < (1 << 20) && file.store(stored, some.data(), some.size())) stored += some.size();
    return file && stored > 0 && stored <= 64 << 10 && file.reserve(stored, some.size()) == DiskSpace::none;
  }));
}

TEST_CASE("the file may be moved, and its name may be another's: that one is not touched", "[trace]") {
  const bool is_older_kernel = GENERATE(false, true);
  const TestFolder folder;
  const fs::path path = folder.path() / "file";
  CHECK(holds_in_child(is_older_kernel, [&] {
    SharedFile file(path, 1 << 20, SharedFile::Opening::create);
    if (file.reserve(0, host_page_bytes()) != DiskSpace::enough) return false;
    fs::rename(path, folder.path() / "moved");
    folder.write("file", "the user's");
    const DiskSpace later = file.reserve(host_page_bytes(), host_page_bytes());
    file.write_out(0, host_page_bytes());
    file.at(0)[0] = 'x';
    return later == (is_older_kernel ? DiskSpace::unreachable : DiskSpace::enough) &&
           file.find_space() == DiskSpace::unreachable;
  }));
  CHECK(text_of(path) == "the user's");
  CHECK(text_of(folder.path() / "moved").front() == 'x');
}

TEST_CASE("the program may change its folder", "[trace]") {
  const bool is_older_kernel = GENERATE(false, true);
  const TestFolder folder;
  CHECK(holds_in_child(is_older_kernel, [&] {
    fs::current_path(folder.path());
    SharedFile file("file", 1 << 20, SharedFile::Opening::create);
    fs::current_path("/");
    return file.reserve(0, 1 << 20) == DiskSpace::enough;
  }));
}

TEST_CASE("a descriptor whose number the program has taken meanwhile is neither used nor closed", "[trace]") {
  const TestFolder folder;
  const fs::path users = folder.write("users", "the user's");
  const int of_user = open(users.c_str(), O_RDWR | O_CLOEXEC);
  int number = -1;
  {
    const FileDescriptor ours(folder.write("file").c_str(), O_RDWR);
    number = ours.number();
    REQUIRE(number > of_user);
    REQUIRE(dup2(of_user, number) == number);
    CHECK(ours.number() == -1);
  }
  CHECK(fcntl(number, F_GETFD) == 0);
  close(number);
  close(of_user);
}

TEST_CASE("processes that join a file share it, whoever comes first", "[trace]") {
  const TestFolder folder;
  const auto join = [&] {
    return SharedFile(folder.path() / "file", 2 * host_page_bytes(), SharedFile::Opening::create_or_join);
  };
  SharedFile first = join(), second = join();
  const int sent = 7;
  int received = 0;
  CHECK(first.store(host_page_bytes(), &sent, sizeof sent));
  CHECK(second.load(host_page_bytes(), &received, sizeof received));
  CHECK(received == sent);
  CHECK(SharedFile(folder.path() / "file", host_page_bytes(), SharedFile::Opening::create).error() == EEXIST);
  first.become_private(host_page_bytes());
  const int unsent = 8;
  CHECK(first.store(host_page_bytes(), &unsent, sizeof unsent));
  CHECK(second.load(host_page_bytes(), &received, sizeof received));
  CHECK(received == sent);
}

TEST_CASE("a planted link and a file of somebody else are not joined", "[trace]") {
  const TestFolder folder;
  const fs::path precious = folder.write("precious", "precious");
  const auto error_of = [&](const fs::path& path) {
    return SharedFile(path, host_page_bytes(), SharedFile::Opening::create_or_join).error();
  };
  fs::create_symlink(precious, folder.path() / "link");
  CHECK(error_of(folder.path() / "link") == ELOOP);
  fs::create_hard_link(precious, folder.path() / "hard");
  CHECK(error_of(folder.path() / "hard") == EACCES);
  CHECK(text_of(precious) == "precious");
  const fs::path foreign = folder.write("foreign");
  if (chown(foreign.c_str(), 65534, 65534) == 0) CHECK(error_of(foreign) == EACCES);
}

TEST_CASE("a limit of file sizes is an error and no signal", "[trace]") {
  const TestFolder folder;
  CHECK(holds_in_child(false, [&] {
    const rlimit limit{.rlim_cur = host_page_bytes(), .rlim_max = host_page_bytes()};
    setrlimit(RLIMIT_FSIZE, &limit);
    return SharedFile(folder.path() / "file", 2 * host_page_bytes(), SharedFile::Opening::create).error() == EFBIG;
  }));
}

TEST_CASE("a private folder is made or is the user's own, and never somebody else's or a link", "[trace]") {
  const TestFolder folder;
  const fs::path made = folder.path() / "made", open_to_all = folder.path() / "open", link = folder.path() / "link";
  CHECK(make_private_folder(made.c_str()));
  CHECK(make_private_folder(made.c_str()));
  CHECK((fs::status(made).permissions() & fs::perms::mask) == fs::perms::owner_all);
  fs::create_directory(open_to_all);
  fs::permissions(open_to_all, fs::perms::all);
  CHECK_FALSE(make_private_folder(open_to_all.c_str()));
  fs::create_directory_symlink(made, link);
  CHECK_FALSE(make_private_folder(link.c_str()));
  if (chown(made.c_str(), 65534, 65534) == 0) CHECK_FALSE(make_private_folder(made.c_str()));
}
