#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace oomdiag {

/// What a value of an operator's inputs or outputs is; the kinds that decide about work.
struct WorkValue {
  enum class Kind { tensor, list, number, flags, other };
  Kind kind = Kind::other;
  std::string dtype{};            ///< of a tensor or a list of tensors, as c10::toString has it: "Float", "BFloat16"
  std::vector<int64_t> values{};  ///< a tensor's shape; one number or bool; the bools of a list of them
  int64_t bytes = 0;              ///< of a tensor or a list of tensors
  int64_t matrix_elements = 0;    ///< of a list: elements of its tensors of two dimensions and more
  int64_t count = 0;              ///< of a list: its tensors
  bool on_host = false;           ///< a tensor that is not on a GPU
  bool strided = false;           ///< a tensor in whose last dimension neighbours lie apart in memory

  bool is_tensor() const { return kind == Kind::tensor; }
};

/// A line of a meter's file: one operator with these inputs and outputs, that ran `count` times in a phase of a step.
struct MeteredOperator {
  int64_t step = 0;
  std::string phase{};         ///< setup, forward, recomputation, backward, optimizer
  uint32_t module = 0;         ///< index into the names of the trace; 0 = none
  std::string name{};          ///< "aten::mm"
  bool on_own_stream = false;  ///< a copy beside what the default stream computes
  int64_t count = 0;
  std::vector<WorkValue> inputs{}, outputs{};
};

/// A line of a meter's file. Throws Error(ErrorKind::input) if it is none.
MeteredOperator parse_metered_operator(std::string_view line);

/// What the recorder metered of a run (extension/record/work_meter.h).
struct MeteredRun {
  int64_t steps = 0;           ///< that were over
  int64_t ranks_per_host = 0;  ///< of a job; 0 = all are on one
  std::string links{};         ///< as --topology has them: "nvlink,rdma"; empty = not given
  std::vector<MeteredOperator> operators{};
};

/// Throws Error(ErrorKind::input) if `text` is no meter's file.
MeteredRun parse_metered_run(std::string_view text);

}  // namespace oomdiag
