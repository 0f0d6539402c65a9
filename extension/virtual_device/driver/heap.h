#pragma once

#include <cstdint>

#include "extension/virtual_device/driver/small_heap.h"

namespace oomdiag {

/// Where a heap's pages are taken: of a GPU, or of a pool.
class Pages {
 public:
  virtual bool charge_pages(int64_t bytes) = 0;
  virtual void refund_pages(int64_t bytes) = 0;

 protected:
  ~Pages() = default;
};

enum class Oom { none, of_gpu, of_host };

/// Blocks of a GPU: small ones share pages, a larger one has its own. Under memory_lock().
class Heap {
 public:
  explicit Heap(Pages& pages) : pages_(pages) {}

  /// Reserves `bytes` at `begin`, or why there is none.
  Oom allocate(int64_t bytes, uintptr_t* begin);

  void free(uintptr_t begin, int64_t bytes);

 private:
  Oom allocate_pages(int64_t bytes, uintptr_t* begin);
  void free_pages(uintptr_t begin, int64_t bytes);

  Pages& pages_;
  SmallHeap small_;
};

}  // namespace oomdiag
