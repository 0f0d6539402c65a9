#include "extension/record/newest_outputs.h"

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <typeinfo>

namespace oomdiag {

namespace {

using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;

struct Newest {
  static constexpr size_t kCount = 256;
  std::vector<WeakTensor> ring;
  size_t next = 0;
};
thread_local Newest newest;

// A weak reference lets the bytes of a tensor go, but of a wrapper (torch.func) not the tensor inside, which is a member of its
// own class: that would live as long as we remember.
bool is_wrapper(const at::Tensor& tensor) {
  const at::TensorImpl& implementation = *tensor.unsafeGetTensorImpl();
  return typeid(implementation) != typeid(at::TensorImpl);
}

void remember(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda() || is_wrapper(tensor)) return;
  if (!tensor.requires_grad() || !tensor.grad_fn()) return;
  WeakTensor weak(tensor.getIntrusivePtr());
  if (newest.ring.size() < Newest::kCount) {
    newest.ring.push_back(std::move(weak));
  } else {
    newest.ring[newest.next] = std::move(weak);
  }
  newest.next = (newest.next + 1) % Newest::kCount;
}

}  // namespace

void remember_outputs(const std::vector<c10::IValue>& outputs) {
  for (const auto& output : outputs) {
    if (output.isTensor()) {
      remember(output.toTensor());
    } else if (output.isTensorList()) {
      for (const at::Tensor& tensor : output.toTensorVector()) remember(tensor);
    }
  }
}

std::vector<at::Tensor> living_outputs() {
  std::vector<at::Tensor> alive;
  const size_t count = newest.ring.size();
  for (size_t i = 1; i <= count; ++i) {
    const WeakTensor& weak = newest.ring[(newest.next + count - i) % count];
    if (auto strong = weak.lock()) alive.emplace_back(std::move(strong));
  }
  return alive;
}

}  // namespace oomdiag
