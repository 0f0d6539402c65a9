#include "extension/record/trace_place.h"

#include <unistd.h>

#include <string>
#include <vector>

#include "extension/environment.h"
#include "profiler/error.h"
#include "profiler/trace/shared_file.h"
#include "profiler/trace/writer.h"

namespace oomdiag {
namespace {

namespace fs = std::filesystem;

/// Where the trace may go, best first.
std::vector<fs::path> list_places(const fs::path& run) {
  const std::string pid = std::to_string(getpid());
  const int64_t rank = variables::number("RANK", -1);
  const bool is_rank = rank >= 0 && variables::number("WORLD_SIZE", 1) > 1;
  const std::string own = is_rank ? "rank-" + std::to_string(rank) : "";
  std::vector<fs::path> places{run / own, run / (is_rank ? own + "-" + pid : pid)};
  for (int again = 2; again < 10; ++again) places.push_back(places[1].string() + "-" + std::to_string(again));
  return places;
}

}  // namespace

PlacedTrace place_trace(const fs::path& run, uint32_t device_count, const TraceBudget& budget) {
  for (const fs::path& folder : list_places(run)) {
    std::error_code ignored;
    const fs::path file = folder / "trace";
    if (fs::exists(file, ignored)) continue;
    if (folder != run / "" && !make_trace_folder(folder)) continue;
    try {
      return {file, std::make_unique<TraceWriter>(file, device_count, budget)};
    } catch (const Error&) {
      if (!fs::exists(file, ignored)) throw;  // else another process was quicker
    }
  }
  throw Error(ErrorKind::environment, "'" + run.string() + "' is full of traces of this process");
}

bool make_trace_folder(const fs::path& folder) {
  std::error_code ignored;
  const fs::path whole = folder.has_filename() ? folder : folder.parent_path();
  fs::create_directories(whole.parent_path(), ignored);
  return make_private_folder(whole.c_str());
}

}  // namespace oomdiag
