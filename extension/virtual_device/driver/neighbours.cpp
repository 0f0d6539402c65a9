#include "extension/virtual_device/driver/neighbours.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <string>

#include "extension/virtual_device/driver/devices.h"

namespace oomdiag {
namespace {

constexpr size_t kMostProcesses = 256;

/// A process's share of each card. A new file is all zeros: rows of nobody.
struct Row {
  std::atomic<pid_t> pid;
  std::atomic<int64_t> bytes[kMostDevices];
};
static_assert(std::atomic<int64_t>::is_always_lock_free);

int file = -1;
Row* rows = nullptr;
Row* own = nullptr;

/// Of the open file, not of the process: it goes with a process that dies (fcntl(2), open file description locks).
void lock_file(short type) {
  struct flock whole {};
  whole.l_type = type;
  whole.l_whence = SEEK_SET;
  while (fcntl(file, F_OFD_SETLKW, &whole) != 0 && errno == EINTR) {
  }
}

bool open_rows() {
  const char* folder = std::getenv("OOMDIAG_OUTPUT");
  if (!folder || !*folder) return false;
  file = open((std::string(folder) + "/cards").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  constexpr size_t bytes = kMostProcesses * sizeof(Row);
  if (file < 0 || posix_fallocate(file, 0, bytes) != 0) return false;  // a store into a hole of a full disk is a SIGBUS
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) return false;
  rows = static_cast<Row*>(mapped);
  return true;
}

/// A process that ended but was not waited for yet has no memory any more (proc(5), stat: the state follows the name).
bool is_alive(pid_t pid) {
  std::ifstream stream("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(stream, text);
  const size_t name_end = text.rfind(')');
  return name_end != text.npos && text.size() > name_end + 2 && text[name_end + 2] != 'Z' && text[name_end + 2] != 'X';
}

/// A row of ours is left over from before an exec.
bool is_free(const Row& row) { return row.pid == 0 || row.pid == getpid() || !is_alive(row.pid); }

void take_row(Row& row) {
  for (auto& bytes : row.bytes) bytes = 0;
  row.pid = getpid();
  own = &row;
}

}  // namespace

void join_neighbours() noexcept {
  if (!open_rows()) return;
  const NeighbourLock guard;
  for (size_t i = 0; i < kMostProcesses && !own; ++i) {
    if (rows[i].pid == getpid()) take_row(rows[i]);
  }
  for (size_t i = 0; i < kMostProcesses && !own; ++i) {
    if (is_free(rows[i])) take_row(rows[i]);
  }
}

NeighbourLock::NeighbourLock() noexcept {
  if (rows) lock_file(F_WRLCK);
}

NeighbourLock::~NeighbourLock() {
  if (rows) lock_file(F_UNLCK);
}

int64_t count_neighbours_bytes(int index) noexcept {
  int64_t sum = 0;
  for (size_t i = 0; rows && i < kMostProcesses; ++i) {
    const int64_t bytes = rows[i].bytes[index];
    if (bytes != 0 && !is_free(rows[i])) sum += bytes;
  }
  return sum;
}

void publish_own_bytes(int index, int64_t bytes) noexcept {
  if (own && check_initialized() == CUDA_SUCCESS)
    own->bytes[index] = bytes;  // not in a forked child: it is the parent's
}

std::vector<Neighbour> list_neighbours(int index) {
  std::vector<Neighbour> found;
  for (size_t i = 0; rows && i < kMostProcesses; ++i) {
    const int64_t bytes = rows[i].bytes[index];
    if (bytes != 0 && !is_free(rows[i])) found.push_back({rows[i].pid, bytes});
  }
  return found;
}

}  // namespace oomdiag
