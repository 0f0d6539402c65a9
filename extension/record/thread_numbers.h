#pragma once

#include <bitset>
#include <cstdint>
#include <mutex>

namespace oomdiag {

/// The numbers of threads in events, which hold 16 bits. PyTorch counts threads from 1 and gives no number twice, so
/// a program that makes a thread for each request gets beyond that one day.
///
/// Two things have a number. A writing thread has one that no other living thread has. An autograd node has that of its
/// forward op's thread, by which it is joined with the op that made it: there a number must never stand for a second thread,
/// so the nodes of all threads from the 65 535th on have the number kUnnumbered, which is joined with nothing.
class ThreadNumbers {
 public:
  static constexpr uint16_t kUnnumbered = 0xffff;
  /// That of a node's thread, by PyTorch's number.
  static constexpr uint16_t of_node(uint64_t id) noexcept {
    return id < kUnnumbered ? static_cast<uint16_t>(id) : kUnnumbered;
  }

  /// A number for a writing thread: PyTorch's own where it fits and is free. Any thread.
  uint16_t take(uint64_t id);
  void release(uint16_t number);

 private:
  std::mutex mutex_;
  std::bitset<size_t{1} << 16> taken_;  ///< guarded by the mutex
};

}  // namespace oomdiag
