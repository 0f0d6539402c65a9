#pragma once

#include <cstdint>
#include <filesystem>

namespace oomdiag {

/// A part of a mapped file that is filled from its beginning on.
struct FileSection {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t reserved = 0;  ///< of them, those that may be written
};

/// A new sparse file, mapped shared. A store into a page that a full disk cannot hold is a SIGBUS: room is reserved before
/// it is used.
class MappedFile {
 public:
  /// Creates `file`, which must not exist, with room for its first `reserved` bytes. Throws Error(environment).
  MappedFile(const std::filesystem::path& file, uint64_t bytes, uint64_t reserved);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  char* at(uint64_t offset) const { return map_ + offset; }
  /// What is stored from here on stays in this process's memory, as in a child of fork. Neither locks nor allocates.
  void become_private() noexcept;
  /// Whether a store into what was reserved may be a SIGBUS all the same, once the disk is full: then it is to be looked at.
  bool may_lose_room() const noexcept { return may_lose_room_; }
  /// Neither locks nor allocates.
  bool disk_is_nearly_full() const noexcept;
  /// Writes what memory has there to the file, if the disk can take it: no signal comes if not.
  void write_out(uint64_t offset, uint64_t bytes) const noexcept;
  /// False if the disk has no room. Neither locks nor allocates.
  bool reserve(uint64_t offset, uint64_t bytes) noexcept;
  /// Reserves the first `end` bytes of a section, which it has, and some more. One thread at a time.
  bool reserve_up_to(FileSection& section, uint64_t end) noexcept;

 private:
  int file_ = -1;
  char* map_ = nullptr;
  uint64_t bytes_ = 0;
  bool may_lose_room_ = false;
};

/// `bytes` or the next multiple of `unit`.
constexpr uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace oomdiag
