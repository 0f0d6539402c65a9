#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <string>

// A file that processes share: the trace, the table of the virtual GPUs, what ranks send each other.
//
// One policy for all of them. The file is created with O_EXCL, O_NOFOLLOW and mode 0600; who joins one that exists checks
// that it is a regular file of the same user. It is mapped, and its descriptor is closed: programs close descriptors that
// they do not know, and the number then belongs to a file of theirs. The few calls that need a descriptor open the file
// again by its name (FileDescriptor). A store into a page for which a full disk has no block is a SIGBUS, so blocks are
// reserved before each range is first touched.

namespace oomdiag {

/// Of this machine: 4 KiB on x86-64, up to 64 KiB on 64-bit ARM (Grace). Neither locks nor allocates.
uint64_t host_page_bytes() noexcept;

/// Whether a file has blocks for what is to be stored.
enum class DiskSpace : uint8_t {
  enough,
  none,        ///< the disk is full, or nearly so
  unreachable  ///< needs a descriptor, and the file cannot be opened again: moved, removed, or outside of a chroot
};

struct FileIdentity {
  dev_t device = 0;
  ino_t inode = 0;

  bool operator==(const FileIdentity&) const = default;
};

/// A descriptor for one call or lock. Its number is high: a file that the program opens never gets the same one, should a
/// thread close ours meanwhile. Neither locks nor allocates.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  /// Opens `path` with O_NOFOLLOW and O_CLOEXEC. Where that fails, errno says why.
  FileDescriptor(const char* path, int flags) noexcept;
  /// Opens it again for reading and writing, if it still is that file.
  FileDescriptor(const char* path, const FileIdentity& expected) noexcept;
  ~FileDescriptor();
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;

  /// The number to use now: -1 unless it still is that of the file that was opened.
  int number() const noexcept;
  const FileIdentity& identity() const noexcept { return identity_; }

 private:
  int number_ = -1;
  FileIdentity identity_;
};

class SharedFile {
 public:
  enum class Opening : uint8_t { create, create_or_join };

  /// A sparse file of `bytes`, all zeros where nobody has written. Is false where it cannot be had: see `error`.
  SharedFile(const std::filesystem::path& path, uint64_t bytes, Opening opening);
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  explicit operator bool() const noexcept { return map_ != nullptr; }
  /// The errno of the call that failed.
  int error() const noexcept { return error_; }
  const std::string& path() const noexcept { return path_; }
  char* at(uint64_t offset) const noexcept { return map_ + offset; }

  // None of these locks, allocates or throws.

  /// Makes loads and stores in this range safe on a full disk.
  DiskSpace reserve(uint64_t offset, uint64_t bytes) noexcept;
  /// Copies into or out of the file, reserving the range. False if the disk is full.
  bool store(uint64_t offset, const void* from, uint64_t bytes) noexcept;
  bool load(uint64_t offset, void* to, uint64_t bytes) noexcept;

  /// Opens the file again: `number()` is -1 if it cannot be opened or is another one.
  FileDescriptor open_again() const noexcept { return {path_.c_str(), identity_}; }
  void remove() const noexcept;

  /// What is stored from here on stays in this process's memory, as in a child of fork. What lies behind the first
  /// `kept_bytes`, which are whole pages, reads as zeros.
  void become_private(uint64_t kept_bytes) noexcept;
  /// Whether a store into what was reserved may be a SIGBUS all the same, once the disk is nearly full: see
  /// `find_space`.
  bool may_lose_room() const noexcept { return may_lose_room_; }
  DiskSpace find_space() const noexcept;
  /// Writes what memory has there to the file, if the disk can take it: no signal comes if not.
  void write_out(uint64_t offset, uint64_t bytes) const noexcept;

 private:
  bool open_and_map(uint64_t bytes, Opening opening) noexcept;
  bool map(const FileDescriptor& file, uint64_t bytes) noexcept;

  std::string path_;
  FileIdentity identity_;
  char* map_ = nullptr;
  uint64_t bytes_ = 0;
  int error_ = 0;
  bool may_lose_room_ = false;
  std::atomic<bool> is_private_ = false;
};

/// A part of a file that is filled from its beginning on.
struct FileSection {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t reserved = 0;  ///< of them, those that may be touched

  /// Reserves the first `end` bytes, which it has, and some more. One thread at a time.
  DiskSpace reserve_up_to(SharedFile& file, uint64_t end) noexcept;
};

/// Makes a folder that only its owner may look into. True also where it is there already, is a folder and not a link,
/// belongs to this user, and nobody else may write into it.
bool make_private_folder(const char* path) noexcept;

/// `bytes` or the next multiple of `unit`.
constexpr uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace oomdiag
