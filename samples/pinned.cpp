// Loading data: from pageable memory, from pinned memory, and ahead of time on a stream of its own.

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <deque>
#include <optional>

#include "samples/deepcnn.h"
#include "samples/training.h"

namespace samples {

namespace {

constexpr size_t kAhead = 2;  ///< batches that are on their way while one is in use

/// Gives batches on the device.
class Loader {
 public:
  explicit Loader(const Options& options)
      : options_(options), pins_(options.variant != "pageable" && options.device.is_cuda()) {
    const c10::Device gpu(torch::kCUDA, 0);
    if (pins_ && options.variant == "prefetch") {
      stream_ = c10::impl::VirtualGuardImpl(torch::kCUDA).getStreamFromGlobalPool(gpu);
    }
  }

  torch::Tensor next() {
    const size_t ahead = options_.variant == "prefetch" ? kAhead : 0;
    while (waiting_.size() <= ahead) waiting_.push_back(copy(read()));
    auto batch = waiting_.front();
    waiting_.pop_front();
    // The batch was allocated on the other stream and is used on this one.
    if (stream_) batch.record_stream(c10::impl::VirtualGuardImpl(torch::kCUDA).getStream(batch.device()));
    return batch;
  }

 private:
  /// What a data set would give: a batch in the host's memory.
  torch::Tensor read() const {
    const auto batch = torch::randn({options_.batch, 3, 64, 64});
    return pins_ ? batch.pin_memory() : batch;
  }

  torch::Tensor copy(const torch::Tensor& batch) const {
    SAMPLES_SCOPE("load");
    const c10::OptionalStreamGuard on_stream(stream_);
    return batch.to(options_.device, /*non_blocking=*/pins_);
  }

  Options options_;
  bool pins_;
  std::optional<c10::Stream> stream_;
  std::deque<torch::Tensor> waiting_;
};

}  // namespace

void train_pinned(const Options& options) {
  DeepCnn model;
  move_to(model, options);
  const auto optimizer = make_optimizer(options, model.parameters());
  const auto labels = torch::randint(10, {options.batch}, options.longs());
  Loader loader(options);

  for (int64_t i = 0; i < options.steps; ++i) {
    const auto images = loader.next();
    zero_grad(*optimizer);
    const auto loss = forward_pass(options, [&] { return classify(model.forward(images), labels); });
    backward(loss);
    step(*optimizer, options);
    print_loss(options, loss);
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 7  // 2.6 counts no pinned memory
  if (options.device.is_cuda()) {
    print_fact("pinned_host_bytes", at::getHostAllocator(torch::kCUDA)->get_stats().allocated_bytes.peak);
  }
#endif
}

}  // namespace samples
