#pragma once

#include <string>

#include "extension/virtual_device/device_files/gpu.h"

namespace oomdiag {

/// The GPU as cuDNN wants a device described, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION; keys as published in
/// openxla/xla, target_config/cudnn_device_props.cc. The compute capability decides; the clocks changed no answer.
std::string describe_for_cudnn(const Gpu& gpu);

}  // namespace oomdiag
