#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

namespace oomdiag {

/// The shared objects that ask the driver for memory, numbered. Number 0 is an unknown one.
class Askers {
 public:
  static constexpr size_t kMost = 512;

  /// The number of the object whose code called the driver: the innermost frame of this thread that lies in none of the
  /// layers between (libcuda, the runtime, CUPTI, ctypes, ourselves). Neither locks nor allocates but for the first time that an object
  /// asks. Any thread.
  uint16_t find() noexcept;

  /// "libnccl.so.2"; "" for number 0.
  const char* name(uint16_t number) const noexcept;

 private:
  struct Object {
    std::atomic<const void*> identity = nullptr;  ///< its link_map
    bool is_between = false;
    char name[80] = {};
  };
  size_t number_of(const void* link_map) noexcept;
  size_t look_up(const void* link_map, size_t from, size_t to) const noexcept;
  size_t add(const void* link_map, size_t known) noexcept;

  std::mutex adding_;
  std::array<Object, kMost> objects_{};
  std::atomic<size_t> count_ = 1;
};

/// Whether frames of this shared object (a file name without folders) only pass a request on to the driver.
bool is_between(const char* file_name) noexcept;

/// The frames of this thread outside of the layers between, innermost first: "ncclCommInitRank+0x1f (libnccl.so.2) < …". For
/// when somebody asked for stacks: it allocates and takes the loader's lock.
std::string describe_stack();

}  // namespace oomdiag
