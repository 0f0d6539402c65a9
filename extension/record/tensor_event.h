#pragma once

#include <ATen/core/ATen_fwd.h>
#include <c10/core/ScalarType.h>

#include <string>

#include "profiler/event.h"

namespace c10 {
struct TensorImpl;
}

namespace oomdiag {

/// "[64, 32] float32"
std::string describe_shape(at::IntArrayRef sizes, at::ScalarType type);

/// Says in `event` where the storage of a tensor lies: address, bytes, device. False where it is on no GPU or takes no
/// memory.
bool locate_storage(const c10::TensorImpl& tensor, Event& event);

}  // namespace oomdiag
