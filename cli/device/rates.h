#pragma once

#include <filesystem>
#include <optional>
#include <string_view>

#include "profiler/cost/time_model.h"

namespace oomdiag {

/// What the GPU can do in a second, by its file. `name` is as CUDA gives it, or as after --device. `own`: the device file of the run,
/// which counts before the catalogue if it is there and has that name. None if there is no such GPU.
std::optional<DeviceRates> rates_of_device(std::string_view name, const std::filesystem::path& own = {});

}  // namespace oomdiag
