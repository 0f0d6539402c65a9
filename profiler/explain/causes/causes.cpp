#include "profiler/explain/causes/causes.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "profiler/explain/causes/library_names.h"
#include "profiler/explain/facts/facts.h"
#include "profiler/explain/facts/imbalance.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/replay/history.h"

// Why did the request fail? Each row asks one question of facts that were collected before; the first yes is the cause, and
// nothing overrules it. When more becomes known (imbalance between ranks, the peak of a complete run) it is added to the facts
// and all rows are asked again.
//
// "Enough" means what the allocator asks of the driver: whole segments, 20 MiB for anything from 1 to 10 MiB.

namespace oomdiag {
namespace {

using Foreign = std::span<const NonPytorchOwner>;

// --- conditions

int64_t missing(const FailureFacts& f) {
  return std::max<int64_t>(0, f.segment_bytes - f.free_bytes - f.usable_cached_bytes);
}

int64_t over_limit(const FailureFacts& f) {
  return std::max<int64_t>(0, f.reserved_bytes - f.usable_cached_bytes + f.segment_bytes - f.allowed_bytes);
}

bool is_oversized(const FailureFacts& f) {
  const int64_t usual = std::min(f.non_pytorch_bytes, f.usual_non_pytorch_bytes);
  return f.total_is_known && f.requested_bytes > f.total_bytes - usual;
}

// Where bytes are missing, the growth must be worth them. Where only a free block is missing, growth that is a small part of
// what is allocated is not what to fix first.
bool is_leak(const FailureFacts& f) {
  const int64_t lacking = std::max(missing(f), over_limit(f));
  if (f.other_pools_cached_bytes > f.grown_bytes) return false;  // what a graph's pool keeps is more
  if (lacking > 0) return f.grown_bytes >= lacking;
  return f.grown_bytes > 0 && f.grown_bytes >= f.segment_bytes &&
         f.grown_bytes >= (f.reserved_bytes - f.usable_cached_bytes) / 20;
}

bool is_capped(const FailureFacts& f) {
  return f.allowed_bytes < f.total_bytes && f.reserved_bytes + f.segment_bytes > f.allowed_bytes &&
         f.free_bytes >= f.segment_bytes;
}

// The rest of the step would run as well if all were packed. A loop that keeps each of its results asks for the next one. Of a step
// that is not known as a whole something must be left: in forward at least as much as was requested, and every module must have been called.
bool rest_would_fit(const FailureFacts& f) {
  if (f.lacking_later_bytes() > 0) return false;
  // What is left would serve less than a quarter more of its turns.
  const int64_t turns_left = f.left_if_packed_bytes() / std::max<int64_t>(f.requested_bytes, 1);
  if (f.kept_alike >= kFewestAlike && turns_left < f.kept_alike / kFewestAlike) return false;
  if (f.left_if_packed_bytes() < f.kept_results_bytes / (2 * kFewestAlike)) return false;
  constexpr int64_t kSliver = 512, kPart = 32;  // of the GPU: what the next op takes, and some more of forward
  if (f.step.whole) return true;
  if (!f.forward_continues) return f.left_if_packed_bytes() >= f.total_bytes / kSliver;
  return !f.step.more_comes && f.left_if_packed_bytes() >= std::max(f.requested_bytes, f.total_bytes / kPart);
}

bool is_fragmented(const FailureFacts& f) { return f.is_enough_if_packed() && rest_would_fit(f); }

bool waits_for_stream(const FailureFacts& f) { return !f.is_enough_if_packed() && f.pending_free_bytes >= missing(f); }

bool is_taken_by_others(const FailureFacts& f) {
  constexpr int64_t kLeastPart = 50;  // of the GPU: less is a library's workspace, and what PyTorch holds is the cause
  const int64_t foreign = std::max<int64_t>(0, f.non_pytorch_bytes - f.usual_non_pytorch_bytes);
  const bool is_worth_naming = foreign * kLeastPart >= f.total_bytes;
  return f.total_is_known && is_worth_naming && !f.is_enough_if_packed() && foreign >= missing(f);
}

// If the step lacks more than the workspace itself, a slower algorithm does not help.
bool is_scratch_space(const FailureFacts& f) {
  const int64_t tolerated = f.complete_run_allocated_bytes ? 0 : f.requested_bytes;
  return f.is_workspace && !f.is_enough_if_packed() && f.lacking_later_bytes() <= tolerated;
}

// --- what is missing

int64_t missing_of_step(const FailureFacts& f) { return std::max(f.lacking_later_bytes(), missing(f)); }
int64_t missing_below_limit(const FailureFacts& f) { return f.limit_is_inferred ? 0 : over_limit(f); }
int64_t missing_of_driver(const FailureFacts& f) { return std::max<int64_t>(0, f.requested_bytes - f.free_bytes); }

// --- words

// ": libnccl.so.2 2.00 GiB, process 4711 python 0.50 GiB"
std::string largest_owners(Foreign owners) {
  constexpr size_t kMax = 3;
  std::string text;
  for (size_t i = 0; i < owners.size() && i < kMax; ++i) {
    text += fmt::format("{}{} {}", i == 0 ? ": " : ", ", owners[i].owner, with_unit(owners[i].bytes));
  }
  return text;
}

/// What people call the library that a driver's call came from.
std::string name_of_library(const std::string& file) {
  if (file.starts_with("libtorch_cuda")) return "a kernel";
  const std::string_view library = file.starts_with("lib") ? library_called(std::string_view(file).substr(3)) : "";
  return library.empty() ? file : std::string(library);
}

std::string library_words(const FailureFacts& f, Foreign) {
  const bool can_release = f.releasable_bytes >= std::max<int64_t>(missing_of_driver(f), 1);
  return fmt::format("workspace: {} requested {} from the driver, and {} were free; {}", name_of_library(f.library),
                     with_unit(f.requested_bytes), with_unit(f.free_bytes),
                     can_release ? fmt::format("PyTorch caches {}: torch.cuda.empty_cache() before it frees them",
                                               with_unit(f.releasable_bytes))
                                 : "leave it memory with torch.cuda.set_per_process_memory_fraction()");
}

std::string limit_words(const FailureFacts& f, Foreign) {
  if (f.limit_is_inferred) {
    return fmt::format("fraction cap: the program set a limit of at most {}; the GPU had enough free memory",
                       with_unit(f.allowed_bytes));
  }
  return fmt::format("fraction cap: the program may reserve only {}; the GPU had enough free memory",
                     with_unit(f.allowed_bytes));
}

std::string forward_words(const FailureFacts& f, Foreign) {
  return fmt::format("capacity: even if nothing were fragmented, only {} would be left for the rest of the {}",
                     with_unit(f.left_if_packed_bytes()), f.forward_continues ? "forward pass" : "step");
}

std::string step_words(const FailureFacts& f, Foreign) {
  return fmt::format("capacity: the step needs {}{}, and {} are available", f.step.whole ? "" : "at least ",
                     with_unit(f.step.bytes), with_unit(f.available_bytes()));
}

// The rows, in the order in which they are asked. `because` names the row in the report's JSON.
constexpr CauseRow kCauses[] = {
    // A library asked the driver: the allocator is not asked, and cached bytes do not help.
    {CauseKind::workspace, "library_allocation", [](const FailureFacts& f) { return !f.library.empty(); },
     missing_of_driver, library_words},

    // The device could not give it even if PyTorch held nothing else.
    {CauseKind::oversized_request, "exceeds_device", is_oversized, missing,
     [](const FailureFacts& f, Foreign) {
       return fmt::format("oversized request: {} at once is more than this GPU can ever give",
                          with_unit(f.requested_bytes));
     }},

    // It would fit without what grew from step to step.
    {CauseKind::leak, "grows_every_step", is_leak, missing,
     [](const FailureFacts& f, Foreign) {
       return fmt::format("leak: {} grew up to the end of step {}, {} per step; without it the request would fit",
                          with_unit(f.grown_bytes), f.grown_until_step, with_unit(f.bytes_per_step));
     }},

    // A limit that the program set; the device had enough free.
    {CauseKind::fraction_cap, "limit_set_by_program", is_capped, missing_below_limit, limit_words},

    // Free and cached bytes together are enough, but no free block is; and the rest of the step would run if all were packed.
    {CauseKind::fragmentation, "no_free_block", is_fragmented, missing,
     [](const FailureFacts& f, Foreign) {
       return fmt::format(
           "fragmentation: {} are free or cached, the largest free block has {}; with {} to spare if nothing were "
           "fragmented",
           with_unit(f.free_bytes + f.cached_bytes), with_unit(f.largest_free_block_bytes),
           with_unit(f.left_if_packed_bytes()));
     }},

    // Enough with blocks that are freed but still in use on another stream.
    {CauseKind::pending_frees, "used_on_another_stream", waits_for_stream, missing,
     [](const FailureFacts& f, Foreign) {
       return fmt::format("pending frees: {} are freed but still in use on another stream",
                          with_unit(f.pending_free_bytes));
     }},

    // It would fit if others held no more of the device than a context takes.
    {CauseKind::non_pytorch, "held_by_others", is_taken_by_others, missing,
     [](const FailureFacts& f, Foreign owners) {
       return fmt::format("non-PyTorch memory: {} of the GPU are not PyTorch's{}", with_unit(f.non_pytorch_bytes),
                          largest_owners(owners));
     }},

    // No tensor: scratch space, which a slower algorithm does without.
    {CauseKind::workspace, "scratch_space", is_scratch_space, missing,
     [](const FailureFacts& f, Foreign) {
       return fmt::format("workspace: a library requested scratch space; short by {}", with_unit(missing(f)));
     }},

    // An even share of the work would fit on the device that failed.
    {CauseKind::imbalance, "uneven_share", [](const FailureFacts& f) { return f.imbalance.has_value(); },
     missing_of_step,
     [](const FailureFacts& f, Foreign) {
       const Imbalance uneven = f.imbalance.value_or(Imbalance{});
       return fmt::format("imbalance: this GPU holds {}, the others {}; evenly spread it would fit",
                          with_unit(uneven.fullest_bytes), with_unit(uneven.others_bytes));
     }},

    // Bytes are missing, now or later.
    {CauseKind::capacity, "forward_continues", [](const FailureFacts& f) { return missing_of_step(f) == 0; },
     missing_of_step, forward_words},
    {CauseKind::capacity, "cached_in_other_pools", [](const FailureFacts& f) { return f.other_pools_cached_bytes > 0; },
     missing_of_step,
     [](const FailureFacts& f, Foreign) {
       return fmt::format(
           "capacity: short by {}; {} more are cached, but in private pools (MemPool, CUDA graphs), which serve no "
           "other",
           with_unit(missing_of_step(f)), with_unit(f.other_pools_cached_bytes));
     }},
    {CauseKind::capacity, "step_needs_more", [](const FailureFacts& f) { return f.step.bytes > f.available_bytes(); },
     missing_of_step, step_words},
    {CauseKind::capacity, "next_step_needs_more",
     [](const FailureFacts& f) { return f.step.next_bytes > f.available_bytes(); }, missing_of_step,
     [](const FailureFacts& f, Foreign) {
       return fmt::format(
           "capacity: the next step, with the optimizer's state, needs at least {} here, and {} are available",
           with_unit(f.step.next_bytes), with_unit(f.available_bytes()));
     }},
    {CauseKind::capacity, "short", [](const FailureFacts&) { return true; }, missing_of_step,
     [](const FailureFacts& f, Foreign) {
       return fmt::format("capacity: short by {} even if every cached byte could be used",
                          with_unit(missing_of_step(f)));
     }},
};

}  // namespace

const CauseRow& decide_cause(const FailureFacts& facts) {
  return *std::find_if(std::begin(kCauses), std::end(kCauses) - 1,
                       [&](const CauseRow& row) { return row.holds(facts); });
}

const CauseRow& find_cause_row(CauseKind kind, std::string_view because) {
  return *std::find_if(std::begin(kCauses), std::end(kCauses) - 1,
                       [&](const CauseRow& row) { return row.kind == kind && row.because == because; });
}

}  // namespace oomdiag
