#include "extension/virtual_device/driver/shared_cards.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <string>

#include "extension/environment.h"
#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/locks.h"

namespace oomdiag {
namespace {

constexpr size_t kMostProcesses = 256;

/// A process's share of each card. A new file is all zeros: rows of nobody.
struct Row {
  std::atomic<pid_t> pid;
  std::atomic<int64_t> bytes[kMostDevices];
};
static_assert(std::atomic<int64_t>::is_always_lock_free);

auto& path = *new std::string;  // never destroyed: programs free device memory in their static destructors
Row* rows = nullptr;
Row* own = nullptr;

/// Closed again after each use: programs close descriptors that they do not know, and then use their numbers.
int open_file(int flags) { return open(path.c_str(), O_RDWR | O_CLOEXEC | flags, 0600); }

Row* map_rows(int file) {
  constexpr size_t bytes = kMostProcesses * sizeof(Row);
  if (posix_fallocate(file, 0, bytes) != 0) return nullptr;  // a store into a hole of a full disk is a SIGBUS
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return mapped == MAP_FAILED ? nullptr : static_cast<Row*>(mapped);
}

void open_rows() {
  const char* folder = std::getenv(variables::kOutput);
  if (!folder || !*folder) return;
  path = std::string(folder) + "/cards";
  const int file = open_file(O_CREAT);
  if (file < 0) return;
  rows = map_rows(file);
  close(file);
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

void open_shared_cards() noexcept { open_rows(); }

void join_shared_cards() noexcept {
  if (!rows) return;
  const SharedCardsLock guard;
  for (size_t i = 0; i < kMostProcesses && !own; ++i) {
    if (rows[i].pid == getpid()) take_row(rows[i]);
  }
  for (size_t i = 0; i < kMostProcesses && !own; ++i) {
    if (is_free(rows[i])) take_row(rows[i]);
  }
}

/// Of the open file, not of the process: it goes with a process that dies (fcntl(2), open file description locks).
SharedCardsLock::SharedCardsLock() noexcept {
  if constexpr (kChecksLocks) oomdiag_device_check_lock(LockRank::shared_cards, false);
  if (!rows) return;
  file_ = open_file(0);
  struct flock whole {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  while (file_ >= 0 && fcntl(file_, F_OFD_SETLKW, &whole) != 0 && errno == EINTR) {
  }
}

SharedCardsLock::~SharedCardsLock() {
  if constexpr (kChecksLocks) oomdiag_device_leave_lock(LockRank::shared_cards);
  if (file_ >= 0) close(file_);
}

int64_t count_bytes_of_others(int index) noexcept {
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

std::vector<OtherProcess> list_others(int index) {
  std::vector<OtherProcess> found;
  for (size_t i = 0; rows && i < kMostProcesses; ++i) {
    const int64_t bytes = rows[i].bytes[index];
    if (bytes != 0 && !is_free(rows[i])) found.push_back({rows[i].pid, bytes});
  }
  return found;
}

}  // namespace oomdiag
