#include "extension/virtual_device/driver/shared_gpus.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <memory>
#include <string>

#include "extension/environment.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/locks.h"
#include "profiler/trace/shared_file.h"

namespace oomdiag {
namespace {

constexpr size_t kMaxProcesses = 256;

/// A process's share of each GPU. A new file is all zeros: rows of nobody.
struct Row {
  std::atomic<pid_t> pid;
  std::atomic<int64_t> bytes[kMaxVirtualDevices];
};
static_assert(std::atomic<int64_t>::is_always_lock_free);

SharedFile* table = nullptr;  // never destroyed: programs free device memory in their static destructors
Row* rows = nullptr;          // in it
Row* own = nullptr;

/// A row of ours is left over from before an exec.
bool is_free(const Row& row) { return row.pid == 0 || row.pid == getpid() || !oomdiag_device_is_alive(row.pid); }

void take_row(Row& row) {
  for (auto& bytes : row.bytes) bytes = 0;
  row.pid = getpid();
  own = &row;
}

}  // namespace

void open_shared_gpus() noexcept {
  const char* folder = variables::text(variables::kOutput);
  if (!*folder) return;
  constexpr size_t kBytes = kMaxProcesses * sizeof(Row);
  auto opened =
      std::make_unique<SharedFile>(std::string(folder) + "/gpus", kBytes, SharedFile::Opening::create_or_join);
  if (!*opened || opened->reserve(0, kBytes) != DiskSpace::enough) return;
  table = opened.release();
  rows = reinterpret_cast<Row*>(table->at(0));
}

void join_shared_gpus() noexcept {
  if (!rows) return;
  const SharedGpusLock guard;
  for (size_t i = 0; i < kMaxProcesses && !own; ++i) {
    if (rows[i].pid == getpid()) take_row(rows[i]);
  }
  for (size_t i = 0; i < kMaxProcesses && !own; ++i) {
    if (is_free(rows[i])) take_row(rows[i]);
  }
}

/// Of the open file, not of the process: it goes with a process that dies (fcntl(2), open file description locks).
SharedGpusLock::SharedGpusLock() noexcept : file_(table ? table->open_again() : FileDescriptor()) {
  if constexpr (kChecksLocks) oomdiag_device_check_lock(LockRank::shared_gpus, false);
  const int number = file_.number();
  struct flock whole {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  while (number >= 0 && fcntl(number, F_OFD_SETLKW, &whole) != 0 && errno == EINTR) {
  }
}

SharedGpusLock::~SharedGpusLock() {
  if constexpr (kChecksLocks) oomdiag_device_leave_lock(LockRank::shared_gpus);
}

int64_t count_bytes_of_others(int index) noexcept {
  int64_t sum = 0;
  for (size_t i = 0; rows && i < kMaxProcesses; ++i) {
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
  for (size_t i = 0; rows && i < kMaxProcesses; ++i) {
    const int64_t bytes = rows[i].bytes[index];
    if (bytes != 0 && !is_free(rows[i])) found.push_back({rows[i].pid, bytes});
  }
  return found;
}

}  // namespace oomdiag

// proc(5), stat: the state follows the name, which may hold anything. Without /proc, as in a chroot, a process that can be
// sent a signal is alive.
bool oomdiag_device_is_alive(int pid) noexcept {
  if (pid <= 0 || (kill(pid, 0) != 0 && errno == ESRCH)) return false;
  std::ifstream stream("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(stream, text);
  const size_t name_end = text.rfind(')');
  if (name_end == text.npos || text.size() <= name_end + 2) return true;
  return text[name_end + 2] != 'Z' && text[name_end + 2] != 'X';
}
