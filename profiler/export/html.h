#pragma once

#include <string>
#include <vector>

#include "profiler/export/picture.h"
#include "profiler/report/report.h"

namespace oomdiag {

/// One page that needs no other file and asks for none. `gpus` go with the devices of the report.
std::string to_html(const Report& report, const std::vector<GpuPicture>& gpus);

/// What the page is drawn from, as JSON.
std::string page_data(const Report& report, const std::vector<GpuPicture>& gpus);

}  // namespace oomdiag
