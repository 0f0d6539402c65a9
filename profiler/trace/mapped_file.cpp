#include "profiler/trace/mapped_file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "profiler/error.h"

namespace oomdiag {

namespace {

constexpr uint64_t kReserveStep = 256 << 10;
constexpr uint64_t kLeastRoom = 16 << 20;

// On btrfs every store into a page that was written out takes new room, and on a full disk is a SIGBUS, whatever was reserved.
// A new file can be told to overwrite its pages in place: then it stores into what was reserved (tried with Linux 6.18), also
// through the overlay of a container, which does not tell what lies under it. But what btrfs notes about such a store takes
// room as well, so that one has to look whether there is any. Other file systems keep what they reserved, or like ZFS fail
// later and without a signal. True if it is btrfs.
bool overwrite_in_place(int file) noexcept {
  struct statfs system {};
  int flags = 0;
  if (fstatfs(file, &system) != 0) return false;
  const bool is_btrfs = system.f_type == BTRFS_SUPER_MAGIC;
  if (!is_btrfs && system.f_type != OVERLAYFS_SUPER_MAGIC) return false;
  if (ioctl(file, FS_IOC_GETFLAGS, &flags) != 0) return is_btrfs;
  flags |= FS_NOCOW_FL;
  return ioctl(file, FS_IOC_SETFLAGS, &flags) == 0 || is_btrfs;
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& file, uint64_t bytes, uint64_t reserved) : bytes_(bytes) {
  const auto refuse = [&](const char* what) -> Error {
    const std::string reason = std::strerror(errno);
    if (map_ != nullptr) munmap(map_, bytes_);
    if (file_ >= 0) {
      close(file_);
      unlink(file.c_str());
    }
    return {ErrorKind::environment, std::string("cannot ") + what + " the trace " + file.string() + ": " + reason,
            "choose a folder with room by --folder"};
  };
  rlimit limit{};  // beyond it the kernel does not refuse, it sends SIGXFSZ
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes) {
    errno = EFBIG;
    throw refuse("create");
  }
  file_ = open(file.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file_ < 0) throw refuse("create");
  may_lose_room_ = overwrite_in_place(file_);
  if (ftruncate(file_, static_cast<off_t>(bytes)) != 0) throw refuse("size");
  void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (map == MAP_FAILED) throw refuse("map");
  map_ = static_cast<char*>(map);
  const bool is_full = may_lose_room_ && disk_is_nearly_full();
  if (is_full) errno = ENOSPC;
  if (is_full || !reserve(0, reserved)) throw refuse("reserve room for");
}

MappedFile::~MappedFile() {
  munmap(map_, bytes_);
  close(file_);
}

void MappedFile::become_private() noexcept {
  // Where it fails, the parent's is what it was: the writer is off by now.
  (void)mmap(map_, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, file_, 0);
}

bool MappedFile::disk_is_nearly_full() const noexcept {
  struct statfs system {};
  return fstatfs(file_, &system) == 0 && system.f_bavail * static_cast<uint64_t>(system.f_bsize) < kLeastRoom;
}

void MappedFile::write_out(uint64_t offset, uint64_t bytes) const noexcept {
  (void)!pwrite(file_, at(offset), bytes, static_cast<off_t>(offset));
}

bool MappedFile::reserve(uint64_t offset, uint64_t bytes) noexcept {
  errno = posix_fallocate(file_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  return errno == 0;
}

bool MappedFile::reserve_up_to(FileSection& section, uint64_t end) noexcept {
  if (end <= section.reserved) return true;
  const uint64_t more = std::min(round_up(end - section.reserved, kReserveStep), section.bytes - section.reserved);
  if (!reserve(section.offset + section.reserved, more)) return false;
  section.reserved += more;
  return true;
}

}  // namespace oomdiag
