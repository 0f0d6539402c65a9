#include "cli/experiments/fit_gpus.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/device/gpus.h"
#include "cli/experiments/experiment.h"
#include "cli/experiments/fit.h"
#include "cli/experiments/fit_function.h"
#include "cli/experiments/fit_text.h"
#include "cli/terminal/json_text.h"
#include "cli/terminal/sizes.h"
#include "profiler/report/make/whole_run.h"
#include "profiler/report/text/table.h"
#include "profiler/shape_function/evaluate.h"

// What a program allocates hangs little on the GPU: libraries choose other workspaces for another architecture, and cuBLAS a larger
// one on Hopper. What the GPU has free differs most, and the allocator's algorithm says what that does. Runs prove the smallest.

namespace oomdiag {
namespace {

/// Memory of a GPU like `measured_on` on which as much is free as on `gpu`: one's context takes more than another's.
int64_t bytes_as_on(const GpuEntry& measured_on, const GpuEntry& gpu) {
  return gpu.total_bytes - (gpu.context_bytes - measured_on.context_bytes);
}

void compute(GpuTable& table, const FitRequest& request, const Experiment& large) {
  const MemoryFunction function = MemoryFunction::of_one_run(large);
  table.unknown = function.unknown();
  if (!function.is_known()) return;
  const GpuEntry& learned = request.device.virtual_host()->gpus.front();
  for (GpuFit& one : table.gpus) {
    const ShapeEstimate estimate = function.estimate({}, bytes_as_on(learned, one.gpu));
    one.fits = estimate.fits;
    one.is_exact = one.gpu.capability == learned.capability;
    one.allocated_bytes = estimate.peak_allocated_bytes;
    one.reserved_bytes = estimate.peak_reserved_bytes;
  }
}

void measure(GpuFit& one, const FitRequest& request, Experiments& experiments,
             const std::function<void(std::size_t)>& on_done, std::vector<FitRun>& runs) {
  FitRequest on_gpu = request;
  on_gpu.device.device = VirtualHost{.gpus = std::vector(static_cast<std::size_t>(request.count), one.gpu)};
  Fitter fitter(on_gpu, experiments, on_done);
  Experiment run = fitter.run({{{}, one.gpu.total_bytes}}).front().experiment;
  if (run.passed() && !fitter.holds_to_end({}, one.gpu.total_bytes)) run = fitter.runs().back().experiment;
  runs.insert(runs.end(), fitter.runs().begin(), fitter.runs().end());
  one.fits = run.passed();
  one.is_measured = one.is_exact = true;
  one.allocated_bytes = run.allocated_bytes;
  one.reserved_bytes = run.reserved_bytes;
  one.place = run.place;
}

/// The next GPU that a run must show: the first that fits, and the one before it.
GpuFit* find_unproved(GpuTable& table) {
  const auto first = std::ranges::find_if(table.gpus, &GpuFit::fits);
  if (first == table.gpus.end()) return table.gpus.back().is_measured ? nullptr : &table.gpus.back();
  if (!first->is_measured) return &*first;
  if (first == table.gpus.begin() || (first - 1)->is_measured) return nullptr;
  return &*(first - 1);
}

std::string proof_of(const GpuFit& one) {
  if (one.is_measured) return one.fits ? "run" : "run: out of memory in " + one.place;
  return one.is_exact ? "computed" : "computed: an estimate for another architecture";
}

}  // namespace

const GpuFit* GpuTable::smallest() const {
  const auto first = std::ranges::find_if(gpus, &GpuFit::fits);
  return first == gpus.end() ? nullptr : &*first;
}

GpuTable find_gpus(const FitRequest& request, std::span<const GpuEntry> gpus, Experiments& experiments,
                   const std::function<void(std::size_t)>& on_done, std::vector<FitRun>& runs) {
  GpuTable table{.learned_on = request.device.virtual_host()->gpus.front().id};
  for (const GpuEntry& gpu : gpus) table.gpus.push_back({.gpu = gpu});
  std::ranges::stable_sort(table.gpus, {}, [](const GpuFit& one) { return one.gpu.total_bytes; });
  Fitter fitter(request, experiments, on_done);
  const Experiment large = fitter.learn({{}}).front().experiment;
  runs = fitter.runs();
  if (!large.passed()) {
    table.unknown = "it runs out of memory on any GPU, in " + large.place;
  } else if (is_share_of_gpu(large.allocated_bytes, large.total_bytes)) {
    table.unknown = "it takes a share of whatever GPU it runs on";
  } else {
    compute(table, request, large);
  }
  if (!table.unknown.empty()) return table;
  while (GpuFit* const next = find_unproved(table)) measure(*next, request, experiments, on_done, runs);
  return table;
}

std::optional<GpuEntry> find_card(std::span<const GpuEntry> gpus, const GpuEntry& measured_on, int64_t bytes) {
  const auto card =
      std::ranges::find_if(gpus, [&](const GpuEntry& gpu) { return bytes_as_on(measured_on, gpu) >= bytes; });
  return card == gpus.end() ? std::nullopt : std::optional(*card);
}

std::string gpus_text(const GpuTable& table, const std::vector<FitRun>& runs) {
  if (!table.unknown.empty()) return fmt::format("oomdiag: no GPU can be computed: {}\n", table.unknown);
  const GpuFit* const smallest = table.smallest();
  if (smallest == nullptr) {
    return fmt::format("oomdiag: fits on none of these {} GPUs\n\n  {}\n", table.gpus.size(), count_runs(runs));
  }
  std::string text = fmt::format("oomdiag: the smallest GPU that it fits on is {}, {} GiB\n\n", smallest->gpu.id,
                                 to_gib(smallest->gpu.total_bytes));
  text += "  GiB                    memory  allocated  reserved  fits\n";
  for (const GpuFit& one : table.gpus) {
    if (!one.fits && !one.is_measured) continue;
    text +=
        fmt::format("  {} {:>9}  {:>9} {:>9}  {}   {}\n", padded(one.gpu.id, 18), to_gib(one.gpu.total_bytes),
                    to_gib(one.allocated_bytes), to_gib(one.reserved_bytes), one.fits ? "yes" : "no ", proof_of(one));
  }
  const auto below = std::ranges::count_if(table.gpus, [](const GpuFit& one) { return !one.fits && !one.is_measured; });
  if (below > 0) text += fmt::format("  {} more do not fit it (computed)\n", below);
  text += "\n" + reach_text(runs, {}, smallest->gpu.total_bytes);
  return text + fmt::format("  what it allocates was learned on {}; {}\n", table.learned_on, count_runs(runs));
}

std::string gpus_json(const GpuTable& table, const std::vector<FitRun>& runs) {
  using Json = nlohmann::ordered_json;
  const GpuFit* const smallest = table.smallest();
  Json json = {{"schema", "oomdiag-fit/1"},
               {"smallest_device", text_or_null(smallest == nullptr ? "" : smallest->gpu.id)}};
  json["learned_on"] = table.learned_on;
  json["unknown"] = text_or_null(table.unknown);
  json["devices"] = Json::array();
  for (const GpuFit& one : table.gpus) {
    json["devices"].push_back({{"device", one.gpu.id},
                               {"memory_bytes", one.gpu.total_bytes},
                               {"fits", table.unknown.empty() ? Json(one.fits) : Json(nullptr)},
                               {"measured", one.is_measured},
                               {"exact", one.is_exact},
                               {"peak_allocated_bytes", one.allocated_bytes},
                               {"peak_reserved_bytes", one.reserved_bytes}});
  }
  json["runs"] = runs.size();
  return to_text(json) + "\n";
}

}  // namespace oomdiag
