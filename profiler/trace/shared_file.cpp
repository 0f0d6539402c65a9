#include "profiler/trace/shared_file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "profiler/trace/fences.h"

#ifndef MADV_POPULATE_WRITE  // of Linux 5.14; glibc names it since 2.35
#define MADV_POPULATE_WRITE 23
#endif

namespace oomdiag {
namespace {

constexpr uint64_t kReserveStep = 256 << 10;
constexpr uint64_t kLeastRoom = 16 << 20;
constexpr rlim_t kHighNumber = 900;  // below 1024, for which the table of descriptors need not grow much

bool find_identity(int file, FileIdentity& identity) noexcept {
  struct stat info {};
  if (fstat(file, &info) != 0) return false;
  identity = {.device = info.st_dev, .inode = info.st_ino};
  return true;
}

bool is_file(int number, const FileIdentity& identity) noexcept {
  FileIdentity now;
  return number >= 0 && find_identity(number, now) && now == identity;
}

int least_number() noexcept {
  constexpr rlim_t kSpare = 16;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur < kSpare) return STDERR_FILENO + 1;
  return static_cast<int>(std::clamp<rlim_t>(limit.rlim_cur - kSpare, STDERR_FILENO + 1, kHighNumber));
}

// On btrfs every store into a page that was written out takes new space, and on a full disk is a SIGBUS, whatever was
// reserved. A new file can be set to overwrite its pages in place: then it stores into what was reserved (tried with
// Linux 6.18), also through the overlay of a container, which does not show what lies under it. But what btrfs notes
// about such a store takes space as well, so that one has to look whether there is any. Other file systems keep what
// they reserved, or like ZFS fail later and without a signal. Only an empty file can be set so: everybody does it
// before giving the file its size. True if it is btrfs.
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

/// Beyond RLIMIT_FSIZE the kernel returns no error, it sends SIGXFSZ.
bool may_have_size(uint64_t bytes) noexcept {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur >= bytes) return true;
  errno = EFBIG;
  return false;
}

/// A file that another process has made.
bool may_join(const FileDescriptor& file) noexcept {
  struct stat info {};
  if (fstat(file.number(), &info) != 0) return false;
  if (S_ISREG(info.st_mode) && info.st_uid == geteuid() && info.st_nlink <= 1) return true;
  errno = EACCES;
  return false;
}

/// Linux 5.14 allocates the blocks of mapped pages on request, and answers EFAULT where a store would be a SIGBUS.
enum class Populated : uint8_t { yes, no, unknown_request };

Populated populate(char* from, char* to) noexcept {
  static std::atomic<bool> is_known = true;
  if (!is_known.load(std::memory_order_relaxed)) return Populated::unknown_request;
  if (madvise(from, static_cast<size_t>(to - from), MADV_POPULATE_WRITE) == 0) return Populated::yes;
  if (errno == EFAULT || errno == ENOMEM || errno == EHWPOISON) return Populated::no;
  is_known.store(false, std::memory_order_relaxed);
  return Populated::unknown_request;
}

}  // namespace

uint64_t host_page_bytes() noexcept { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

FileDescriptor::FileDescriptor(const char* path, int flags) noexcept {
  const int low = open(path, flags | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (low < 0) return;
  const int high = fcntl(low, F_DUPFD_CLOEXEC, least_number());
  const int error = errno;
  struct stat named {};
  if (lstat(path, &named) == 0) identity_ = {.device = named.st_dev, .inode = named.st_ino};
  if (is_file(low, identity_)) close(low);  // else a thread of the program has closed it, and the number is of its own
  if (is_file(high, identity_)) {
    number_ = high;
    return;
  }
  if (high >= 0) close(high);
  errno = high < 0 ? error : ESTALE;
}

FileDescriptor::FileDescriptor(const char* path, const FileIdentity& expected) noexcept : FileDescriptor(path, O_RDWR) {
  if (number_ < 0 || identity_ == expected) return;
  close(number_);
  number_ = -1;
  errno = ESTALE;
}

FileDescriptor::~FileDescriptor() {
  if (is_file(number_, identity_)) close(number_);
}

int FileDescriptor::number() const noexcept { return is_file(number_, identity_) ? number_ : -1; }

SharedFile::SharedFile(const std::filesystem::path& path, uint64_t bytes, Opening opening) {
  std::error_code error;  // the program may change its folder later
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  path_ = (error ? path : absolute).string();
  if (!open_and_map(bytes, opening)) error_ = errno;
}

bool SharedFile::open_and_map(uint64_t bytes, Opening opening) noexcept {
  if (!may_have_size(bytes)) return false;
  {
    const FileDescriptor fresh(path_.c_str(), O_RDWR | O_CREAT | O_EXCL);
    if (fresh.number() >= 0) {
      const bool is_mapped = map(fresh, bytes);
      if (!is_mapped) remove();
      return is_mapped;
    }
  }
  if (opening == Opening::create || errno != EEXIST) return false;
  const FileDescriptor old(path_.c_str(), O_RDWR);
  return old.number() >= 0 && may_join(old) && map(old, bytes);
}

bool SharedFile::map(const FileDescriptor& file, uint64_t bytes) noexcept {
  const int number = file.number();
  struct stat info {};
  if (fstat(number, &info) != 0) return false;
  may_lose_room_ = overwrite_in_place(number);
  const bool is_short = static_cast<uint64_t>(info.st_size) < bytes;
  if (is_short && ftruncate(number, static_cast<off_t>(bytes)) != 0) return false;
  void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, number, 0);
  if (found == MAP_FAILED) return false;
  map_ = static_cast<char*>(found);
  bytes_ = bytes;
  identity_ = file.identity();
  return true;
}

SharedFile::~SharedFile() {
  if (map_ != nullptr) munmap(map_, bytes_);
}

DiskSpace SharedFile::reserve(uint64_t offset, uint64_t bytes) noexcept {
  if (is_private_.load(std::memory_order_relaxed)) return DiskSpace::enough;
  const uint64_t page = host_page_bytes();
  const uint64_t from = offset / page * page, to = std::min(round_up(offset + bytes, page), round_up(bytes_, page));
  switch (populate(map_ + from, map_ + to)) {
    case Populated::yes:
      return DiskSpace::enough;
    case Populated::no:
      return DiskSpace::none;
    case Populated::unknown_request:
      break;
  }
  const FileDescriptor file = open_again();
  const int error = posix_fallocate(file.number(), static_cast<off_t>(offset), static_cast<off_t>(bytes));
  if (error == EBADF) return DiskSpace::unreachable;
  return error == 0 ? DiskSpace::enough : DiskSpace::none;
}

bool SharedFile::store(uint64_t offset, const void* from, uint64_t bytes) noexcept {
  if (reserve(offset, bytes) != DiskSpace::enough) return false;
  order_stores();
  std::memcpy(map_ + offset, from, bytes);
  return true;
}

bool SharedFile::load(uint64_t offset, void* to, uint64_t bytes) noexcept {
  if (reserve(offset, bytes) != DiskSpace::enough) return false;
  std::memcpy(to, map_ + offset, bytes);
  order_loads();
  return true;
}

void SharedFile::remove() const noexcept { unlink(path_.c_str()); }

// The kept part is copied first and then moved in one call: other threads may read it meanwhile. Where a call fails, the file
// is what it was.
void SharedFile::become_private(uint64_t kept_bytes) noexcept {
  is_private_.store(true, std::memory_order_relaxed);
  constexpr int kAccess = PROT_READ | PROT_WRITE, kKind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  (void)mmap(map_ + kept_bytes, bytes_ - kept_bytes, kAccess, kKind | MAP_FIXED, -1, 0);
  void* copy = mmap(nullptr, kept_bytes, kAccess, kKind, -1, 0);
  if (copy == MAP_FAILED) return;
  std::memcpy(copy, map_, kept_bytes);
  (void)mremap(copy, kept_bytes, kept_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, map_);
}

DiskSpace SharedFile::find_space() const noexcept {
  struct statfs system {};
  const FileDescriptor file = open_again();
  if (fstatfs(file.number(), &system) != 0) return DiskSpace::unreachable;
  return system.f_bavail * static_cast<uint64_t>(system.f_bsize) < kLeastRoom ? DiskSpace::none : DiskSpace::enough;
}

void SharedFile::write_out(uint64_t offset, uint64_t bytes) const noexcept {
  const FileDescriptor file = open_again();
  (void)!pwrite(file.number(), at(offset), bytes, static_cast<off_t>(offset));
}

DiskSpace FileSection::reserve_up_to(SharedFile& file, uint64_t end) noexcept {
  if (end <= reserved) return DiskSpace::enough;
  const uint64_t more = std::min(round_up(end - reserved, kReserveStep), bytes - reserved);
  const DiskSpace space = file.reserve(offset + reserved, more);
  if (space == DiskSpace::enough) reserved += more;
  return space;
}

bool make_private_folder(const char* path) noexcept {
  if (mkdir(path, S_IRWXU) == 0) return true;
  struct stat info {};
  if (errno != EEXIST || lstat(path, &info) != 0) return false;
  return S_ISDIR(info.st_mode) && info.st_uid == geteuid() && (info.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

}  // namespace oomdiag
