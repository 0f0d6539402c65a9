// Free blocks that cannot be used: large temporaries come and go, and what is kept lies in the middle of where they
// were. Then a request that all the free bytes together could serve, and no single free block can.

#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdlib>

#include "samples/training.h"

namespace samples {

namespace {

constexpr int64_t kPieces = 32;

/// What a piece takes, in floats: all pieces together 85 % of the GPU.
int64_t floats_of_a_piece(const Options& options) {
  if (options.device.is_cpu()) return 1 << 18;
  torch::empty({1}, options.floats());  // the context takes its own
  size_t free_bytes = 0;
  c10::cuda::CUDACachingAllocator::cacheInfo(0, &free_bytes);  // the largest block that can be had
  const auto bytes = static_cast<int64_t>(static_cast<double>(free_bytes) * 0.85) / kPieces;
  return (bytes >> 21 << 21) / 4;
}

torch::Tensor take(const char* name, int64_t floats, const Options& options) {
  return scoped(name, [&] { return torch::empty({floats}, options.floats()); });
}

}  // namespace

// As PYTORCH_ALLOC_CONF in the shell would: the variable is what others in this process read, and libtorch has read it already.
void prepare_fragmented(const Options& options) {
  if (options.variant != "expandable_segments") return;
  setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True", 1);
  c10::cuda::CUDACachingAllocator::setAllocatorSettings("expandable_segments:True");
}

void run_fragmented(const Options& options) {
  const int64_t piece = floats_of_a_piece(options);
  const int64_t small = piece / 5 * 3;  // two of them do not fit where a temporary was
  std::vector<torch::Tensor> temporaries, kept;

  if (options.variant == "kept_first") {
    for (int64_t i = 0; i < kPieces; ++i) kept.push_back(take("kept", small, options));
  }
  const int64_t pieces = options.variant == "kept_first" ? kPieces / 2 : kPieces;
  for (int64_t i = 0; i < pieces; ++i) temporaries.push_back(take("temporary", piece, options));
  for (auto& temporary : temporaries) {
    temporary.reset();
    if (options.variant != "kept_first") kept.push_back(take("kept", small, options));
  }
  const Mark mark("large_request");
  take("large", piece * kPieces / 4, options);
}

}  // namespace samples
