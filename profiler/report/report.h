#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// The report: one value, whatever it is turned into. Names and meanings are those of its JSON, oomdiag-report/1 (design §9
// and report/oomdiag-report-1.schema.json). Bytes are integers, times nanoseconds; an empty string is null in JSON.
namespace oomdiag {

inline constexpr const char* kReportSchema = "oomdiag-report/1";

/// Named figures in a fixed order.
using Figures = std::vector<std::pair<std::string, int64_t>>;

struct ReportDevice {
  int index = 0;
  std::string name;
  bool virtual_device = false;
  int64_t total_bytes = 0;
  std::string compute_capability;

  bool operator==(const ReportDevice&) const = default;
};

struct ReportPeak {
  int64_t allocated_bytes = 0, reserved_bytes = 0;
  std::string phase = "setup";
  uint32_t step = 0;
  std::string node{}, op{}, module{}, source{};  ///< what allocated last before the peak

  bool operator==(const ReportPeak&) const = default;
};

/// An allocation that was refused, and the state then.
struct ReportFailure {
  std::string phase = "other";
  uint32_t step = 0;
  std::string node{}, op{}, module{}, source{};
  std::string inner_op{};  ///< the operator inside of `op` (in backward: inside of `node`) that allocated
  int64_t requested_bytes = 0, allocated_bytes = 0, reserved_bytes = 0, free_bytes = 0;
  std::string wanted{};  ///< "gradient of relu3, [6800, 128, 16, 16] float32", or empty

  bool operator==(const ReportFailure&) const = default;
};

/// Somebody who holds bytes.
struct ReportOwner {
  std::string category;
  int64_t bytes = 0;
  std::string name{};  ///< what it is called where it is made: a module, else an op
  std::string shape{};
  std::vector<std::string> used_by{};  ///< modules whose backward keeps it

  bool operator==(const ReportOwner&) const = default;
};

struct ReportPinnedSegment {
  int64_t bytes = 0, largest_hole_bytes = 0, used_bytes = 0;
  std::vector<ReportOwner> pinned_by{};

  bool operator==(const ReportPinnedSegment&) const = default;
};

struct ReportCause {
  std::string kind;
  int64_t short_by_bytes = 0;
  Figures evidence{};
  std::vector<ReportPinnedSegment> pinned{};

  bool operator==(const ReportCause&) const = default;
};

/// How the bytes of the card are spent at the described moment; adds up to the total.
struct ReportCard {
  int64_t allocated_bytes = 0, pending_free_bytes = 0, cached_bytes = 0, outside_pytorch_bytes = 0, free_bytes = 0;

  bool operator==(const ReportCard&) const = default;
};

struct ReportSavedTensor {
  int64_t bytes = 0;
  std::vector<int64_t> shape{};
  std::string dtype{}, made_by{}, module{}, source{};
  std::vector<std::string> saved_by{}, saved_by_modules{};

  bool operator==(const ReportSavedTensor&) const = default;
};

struct ReportRemedy {
  std::string id, label;
  int64_t predicted_peak_bytes = 0;
  std::optional<int64_t> measured_peak_bytes{};
  std::optional<bool> fits{};  ///< measured
  bool predicted_fits = false;

  bool operator==(const ReportRemedy&) const = default;
};

struct ReportPhase {
  uint32_t step = 0;
  std::string phase;
  int64_t peak_allocated_bytes = 0;

  bool operator==(const ReportPhase&) const = default;
};

struct ReportPoint {
  int64_t time_ns = 0, allocated_bytes = 0, reserved_bytes = 0;

  bool operator==(const ReportPoint&) const = default;
};

struct ReportAbsorbed {
  std::string op;
  int64_t requested_bytes = 0, count = 0;

  bool operator==(const ReportAbsorbed&) const = default;
};

/// The line bytes(b) = fixed + scaling ∙ b / batch, and the largest batch that it predicts to fit.
struct ReportBatch {
  int64_t batch = 0, fixed_bytes = 0, scaling_bytes = 0, largest_batch = 0;

  bool operator==(const ReportBatch&) const = default;
};

/// All that is said about one card.
struct ReportOfDevice {
  ReportDevice device{};
  ReportPeak peak{};
  std::optional<ReportFailure> failure{};
  std::optional<ReportCause> cause{};
  Figures categories{};
  ReportCard card{};
  Figures packing{};  ///< load ≤ pack ≤ reserved ≤ total
  Figures attribution{};
  int64_t headroom_bytes = 0;
  int64_t replay_error_bytes = 0;
  std::vector<ReportOwner> owners{};  ///< the largest blocks, at most 50
  std::vector<ReportSavedTensor> saved_tensors{};
  std::optional<ReportBatch> batch{};
  std::vector<ReportRemedy> remedies{};
  std::vector<ReportPhase> phases{};
  std::vector<ReportPoint> timeline{};
  std::vector<ReportAbsorbed> absorbed{};
  std::vector<ReportFailure> caught{};

  bool operator==(const ReportOfDevice&) const = default;
};

struct Report {
  std::string outcome = "ok";  ///< ok | out_of_memory | killed | failed
  std::optional<int> exit_code{};
  std::string torch{};
  std::string command{};
  std::string folder{};   ///< where it is kept, for the next command to type; not in the JSON
  bool snapshot = false;  ///< of a memory snapshot: no phases, no steps; not in the JSON
  int rank = 0, world_size = 1;
  uint32_t steps = 0;
  uint32_t steady_steps =
      0;  ///< of those: ops were not watched, as each repeated the steps before to the last allocation
  std::vector<ReportOfDevice> devices{};  ///< those that were used, by index
  size_t main_device = 0;                 ///< of `devices`: the one that failed, else the fullest
  std::vector<std::string> limits{};

  bool operator==(const Report&) const = default;
};

}  // namespace oomdiag
