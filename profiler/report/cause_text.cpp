#include "profiler/report/cause_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "profiler/report/library_names.h"
#include "profiler/report/table.h"

namespace oomdiag {
namespace {

// ": libnccl.so.2 2.00 GiB, process 4711 python 0.50 GiB"
std::string largest_holders(const ReportCause& cause) {
  constexpr size_t kMost = 3;
  std::string text;
  for (size_t i = 0; i < cause.holders.size() && i < kMost; ++i) {
    const ReportOutside& holder = cause.holders[i];
    text += fmt::format("{}{} {}", i == 0 ? ": " : ", ", printable(holder.owner, 40), with_unit(holder.bytes));
  }
  return text;
}

/// What people call the library that a driver's call came from.
std::string name_of_library(const std::string& file) {
  if (file.starts_with("libtorch_cuda")) return "a kernel";
  const std::string_view library = file.starts_with("lib") ? library_called(std::string_view(file).substr(3)) : "";
  return library.empty() ? printable(file, 40) : std::string(library);
}

}  // namespace

std::string cause_text(const ReportOfDevice& device) {
  const ReportCause& cause = *device.cause;
  const ReportCard& card = device.card;
  const auto bytes_of = [&](std::string_view name) {
    const auto found = std::find_if(cause.evidence.begin(), cause.evidence.end(),
                                    [&](const auto& evidence) { return evidence.first == name; });
    return found == cause.evidence.end() ? int64_t{0} : found->second;
  };
  const auto figure = [&](std::string_view name) { return with_unit(bytes_of(name)); };
  const int64_t room = card.allocated_bytes + card.pending_free_bytes + card.cached_bytes + card.free_bytes;
  const std::string short_by = with_unit(cause.short_by_bytes);
  if (cause.kind == "capacity" && cause.short_by_bytes == 0) {
    return fmt::format("capacity: {} left if packed without holes, and the forward pass goes on",
                       figure("left_if_packed_bytes"));
  }
  if (cause.kind == "capacity" && bytes_of("cached_in_other_pools_bytes") > 0) {
    return fmt::format(
        "capacity: short by {}; {} more are cached, but in private pools (MemPool, CUDA graphs), which "
        "serve nobody else",
        short_by, figure("cached_in_other_pools_bytes"));
  }
  if (cause.kind == "capacity" && bytes_of("step_bytes") > room) {
    return fmt::format("capacity: the step needs {}, and there are {}", figure("step_bytes"), with_unit(room));
  }
  if (cause.kind == "capacity" && bytes_of("step_at_least_bytes") > room) {
    return fmt::format("capacity: the step needs at least {}, and there are {}", figure("step_at_least_bytes"),
                       with_unit(room));
  }
  if (cause.kind == "capacity") {
    return fmt::format("capacity: short by {} even if every cached byte could be used", short_by);
  }
  if (cause.kind == "fragmentation") {
    return fmt::format("fragmentation: {} free or cached, largest hole {}; {} left if packed without holes",
                       with_unit(card.free_bytes + card.cached_bytes), figure("largest_hole_bytes"),
                       figure("left_if_packed_bytes"));
  }
  if (cause.kind == "pending_frees") {
    return fmt::format("pending frees: {} are freed but still in use on another stream",
                       with_unit(card.pending_free_bytes));
  }
  if (cause.kind == "outside_pytorch") {
    return fmt::format("outside PyTorch: {} of the card are held by others{}", with_unit(card.outside_pytorch_bytes),
                       largest_holders(cause));
  }
  if (cause.kind == "oversized_request") {
    return fmt::format("oversized request: {} at once is more than this card can ever give", figure("requested_bytes"));
  }
  if (cause.kind == "fraction_cap" && bytes_of("allowed_at_most_bytes") > 0) {
    return fmt::format("fraction cap: the program set a limit of at most {}; the card had room",
                       figure("allowed_at_most_bytes"));
  }
  if (cause.kind == "fraction_cap") {
    return fmt::format("fraction cap: the program may reserve {} only; the card had room", figure("allowed_bytes"));
  }
  if (cause.kind == "workspace" && !cause.holders.empty()) {
    const bool can_release = bytes_of("releasable_bytes") >= std::max<int64_t>(cause.short_by_bytes, 1);
    return fmt::format(
        "workspace: {} wanted {} of the card itself, and {} were free; {}", name_of_library(cause.holders[0].owner),
        figure("requested_bytes"), figure("free_bytes"),
        can_release ? fmt::format("PyTorch caches {}: empty_cache() before gives it room", figure("releasable_bytes"))
                    : "PyTorch must leave it room: set_per_process_memory_fraction()");
  }
  if (cause.kind == "workspace") {
    return fmt::format("workspace: a library wanted scratch space; short by {}", short_by);
  }
  if (cause.kind == "leak") {
    const uint32_t last = device.growth.empty() ? 0 : device.growth.front().last_step;
    return fmt::format("leak: {} grew up to the end of step {}, {} per step; without it the request would fit",
                       figure("grown_bytes"), last, figure("bytes_per_step"));
  }
  if (cause.kind == "imbalance") {
    return fmt::format("imbalance: this card holds {}, the others {}; evenly spread it would fit",
                       figure("fullest_bytes"), figure("others_bytes"));
  }
  return printable(cause.kind, 40);
}

}  // namespace oomdiag
