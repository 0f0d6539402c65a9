#include "extension/record/tensor_event.h"

#include <c10/core/TensorImpl.h>

#include "profiler/event.h"

namespace oomdiag {

std::string describe_shape(at::IntArrayRef sizes, at::ScalarType type) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
  text += "] ";
  text += std::string(c10::getDtypeNames(type).first);
  return text;
}

bool locate_storage(const c10::TensorImpl& tensor, Event& event) {
  if (!tensor.is_cuda() || !tensor.has_storage()) return false;
  const c10::Storage& storage = tensor.storage();
  if (storage.nbytes() == 0) return false;
  event.address = reinterpret_cast<uint64_t>(storage.data());
  event.bytes = static_cast<int64_t>(storage.nbytes());
  event.device = static_cast<uint8_t>(tensor.device().index());
  return true;
}

}  // namespace oomdiag
