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
    const OutsideOwner& holder = cause.holders[i];
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

/// The figures that a cause rests on, as words.
class Evidence {
 public:
  explicit Evidence(const ReportCause& cause) : cause_(cause) {}

  int64_t bytes(std::string_view name) const {
    const auto found = std::ranges::find(cause_.evidence, name, &Figures::value_type::first);
    return found == cause_.evidence.end() ? 0 : found->second;
  }
  std::string operator()(std::string_view name) const { return with_unit(bytes(name)); }

 private:
  const ReportCause& cause_;
};

std::string capacity_text(const ReportCause& cause, const Evidence& figure, int64_t room) {
  const std::string short_by = with_unit(cause.short_by_bytes);
  if (cause.short_by_bytes == 0) {
    return fmt::format("capacity: {} left if packed without holes, and the forward pass goes on",
                       figure("left_if_packed_bytes"));
  }
  if (figure.bytes("cached_in_other_pools_bytes") > 0) {
    return fmt::format(
        "capacity: short by {}; {} more are cached, but in private pools (MemPool, CUDA graphs), which "
        "serve nobody else",
        short_by, figure("cached_in_other_pools_bytes"));
  }
  if (figure.bytes("step_bytes") > room) {
    return fmt::format("capacity: the step needs {}, and there are {}", figure("step_bytes"), with_unit(room));
  }
  if (figure.bytes("step_at_least_bytes") > room) {
    return fmt::format("capacity: the step needs at least {}, and there are {}", figure("step_at_least_bytes"),
                       with_unit(room));
  }
  if (figure.bytes("next_step_at_least_bytes") > room) {
    return fmt::format("capacity: the next step, with the optimizer's state, needs at least {} here, and there are {}",
                       figure("next_step_at_least_bytes"), with_unit(room));
  }
  return fmt::format("capacity: short by {} even if every cached byte could be used", short_by);
}

std::string workspace_text(const ReportCause& cause, const Evidence& figure) {
  if (cause.holders.empty()) {
    return fmt::format("workspace: a library wanted scratch space; short by {}", with_unit(cause.short_by_bytes));
  }
  const bool can_release = figure.bytes("releasable_bytes") >= std::max<int64_t>(cause.short_by_bytes, 1);
  return fmt::format(
      "workspace: {} wanted {} of the card itself, and {} were free; {}", name_of_library(cause.holders[0].owner),
      figure("requested_bytes"), figure("free_bytes"),
      can_release ? fmt::format("PyTorch caches {}: empty_cache() before gives it room", figure("releasable_bytes"))
                  : "PyTorch must leave it room: set_per_process_memory_fraction()");
}

std::string cap_text(const Evidence& figure) {
  if (figure.bytes("allowed_at_most_bytes") > 0) {
    return fmt::format("fraction cap: the program set a limit of at most {}; the card had room",
                       figure("allowed_at_most_bytes"));
  }
  return fmt::format("fraction cap: the program may reserve {} only; the card had room", figure("allowed_bytes"));
}

}  // namespace

std::string cause_text(const ReportOfDevice& device) {
  const ReportCause& cause = *device.cause;
  const ReportCard& card = device.card;
  const Evidence figure(cause);
  switch (cause.kind) {
    case CauseKind::capacity:
      return capacity_text(cause, figure,
                           card.allocated_bytes + card.pending_free_bytes + card.cached_bytes + card.free_bytes);
    case CauseKind::fragmentation:
      return fmt::format("fragmentation: {} free or cached, largest hole {}; {} left if packed without holes",
                         with_unit(card.free_bytes + card.cached_bytes), figure("largest_hole_bytes"),
                         figure("left_if_packed_bytes"));
    case CauseKind::pending_frees:
      return fmt::format("pending frees: {} are freed but still in use on another stream",
                         with_unit(card.pending_free_bytes));
    case CauseKind::outside_pytorch:
      return fmt::format("outside PyTorch: {} of the card are held by others{}", with_unit(card.outside_pytorch_bytes),
                         largest_holders(cause));
    case CauseKind::oversized_request:
      return fmt::format("oversized request: {} at once is more than this card can ever give",
                         figure("requested_bytes"));
    case CauseKind::fraction_cap:
      return cap_text(figure);
    case CauseKind::workspace:
      return workspace_text(cause, figure);
    case CauseKind::leak:
      return fmt::format("leak: {} grew up to the end of step {}, {} per step; without it the request would fit",
                         figure("grown_bytes"), device.growth.empty() ? 0 : device.growth.front().last_step,
                         figure("bytes_per_step"));
    case CauseKind::imbalance:
      return fmt::format("imbalance: this card holds {}, the others {}; evenly spread it would fit",
                         figure("fullest_bytes"), figure("others_bytes"));
  }
  return {};
}

}  // namespace oomdiag
