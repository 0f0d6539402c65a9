#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

namespace oomdiag {

/// The shared objects that call the driver for memory, numbered. Number 0 is an unknown one.
class CallingLibraries {
 public:
  static constexpr size_t kMax = 512;

  /// The number of the object whose code called the driver: the innermost frame of this thread that lies in none of the
  /// CUDA layers (libcuda, the runtime, CUPTI, ctypes, oomdiag). Locks and allocates only the first time that an object
  /// calls. Any thread.
  uint16_t find() noexcept;

  /// "libnccl.so.2"; "" for number 0.
  const char* name(uint16_t number) const noexcept;

 private:
  struct Object {
    std::atomic<const void*> identity = nullptr;  ///< its link_map
    bool is_cuda_layer = false;
    char name[80] = {};
  };
  size_t number_of(const void* link_map) noexcept;
  size_t look_up(const void* link_map, size_t from, size_t to) const noexcept;
  size_t add(const void* link_map, size_t known) noexcept;

  std::mutex adding_;
  std::array<Object, kMax> objects_{};
  std::atomic<size_t> count_ = 1;
};

/// Whether this shared object (a file name without folders) is a layer that only passes calls on to the driver.
bool is_cuda_layer(const char* file_name) noexcept;

/// The frames of this thread outside of the CUDA layers, innermost first: "ncclCommInitRank+0x1f (libnccl.so.2) < …". For
/// runs with OOMDIAG_DRIVER_STACKS only: it allocates and takes the loader's lock.
std::string describe_stack();

}  // namespace oomdiag
