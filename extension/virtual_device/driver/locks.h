#pragma once

#include <mutex>
#include <string_view>
#include <type_traits>

#include "extension/virtual_device/entry_point.h"

// The locks of the virtual device, in the order in which they are taken: whoever holds one may take those below it only, so
// that no two threads ever wait for each other.
//
//   library       a mock's own tables (plans, descriptors, mailboxes, kernels): it may call the driver under its lock, and
//                 holds no other mock's
//   notes         what was noted, and its observer. The recorder is called under it, and may call the driver; recursive, as
//                 that may be noted in turn
//   streams       streams, events, captures and graphs; recursive, as what is done under it calls each other
//   memory        the accounts, ranges, heaps, pools, mappings, limits
//   shared GPUs  the file of the processes that share the GPUs
//   contents      what the host wrote. It is not held while a promise is waited for: who keeps it may be a thread of ours
//
// A build with OOMDIAG_CHECK_LOCKS, as all for a sanitizer are, aborts where a thread takes one out of order and says which
// two. In others an OrderedLock is its mutex and nothing else.

namespace oomdiag {

enum class LockRank { library, notes, streams, memory, shared_gpus, contents };
inline constexpr std::string_view kLockNames[] = {"library", "notes", "streams", "memory", "shared GPUs", "contents"};

#ifdef OOMDIAG_CHECK_LOCKS
inline constexpr bool kChecksLocks = true;
#else
inline constexpr bool kChecksLocks = false;
#endif

}  // namespace oomdiag

/// This thread is about to take a lock of that rank: aborts if it has one that must not come before, with one line.
OOMDIAG_ENTRY_POINT void oomdiag_device_check_lock(oomdiag::LockRank rank, bool is_recursive) noexcept;

/// It has given the lock back.
OOMDIAG_ENTRY_POINT void oomdiag_device_leave_lock(oomdiag::LockRank rank) noexcept;

namespace oomdiag {

/// A mutex with its place in the order.
template <LockRank kRank, typename Mutex = std::mutex, bool kChecks = kChecksLocks>
class OrderedLock {
 public:
  void lock() {
    constexpr bool is_recursive = !std::is_same_v<Mutex, std::mutex>;
    if constexpr (kChecks) oomdiag_device_check_lock(kRank, is_recursive);
    mutex_.lock();
  }
  void unlock() {
    mutex_.unlock();
    if constexpr (kChecks) oomdiag_device_leave_lock(kRank);
  }

 private:
  Mutex mutex_;
};

using LibraryLock = OrderedLock<LockRank::library>;
using NotesLock = OrderedLock<LockRank::notes, std::recursive_mutex>;
using StreamsLock = OrderedLock<LockRank::streams, std::recursive_mutex>;
using MemoryLock = OrderedLock<LockRank::memory>;
using ContentsLock = OrderedLock<LockRank::contents>;

}  // namespace oomdiag
