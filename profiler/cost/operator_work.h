#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// What an operator has to do, from the shapes of its inputs and outputs.
namespace oomdiag {

/// What a value of an operator's inputs or outputs is; the kinds that decide about work.
struct WorkValue {
  enum class Kind { tensor, number, flags, other };
  Kind kind = Kind::other;
  std::string dtype{};            ///< of a tensor, as c10::toString has it: "Float", "BFloat16"
  std::vector<int64_t> values{};  ///< a tensor's shape; one number or bool; the bools of a list
  int64_t bytes = 0;              ///< of a tensor: elements x bytes of each
};

/// A line of a meter's file: one operator with these inputs and outputs, that ran `count` times in a phase of a step.
struct MeteredOperator {
  int64_t step = 0;
  std::string phase{};  ///< forward, backward, optimizer
  std::string name{};   ///< "aten::mm"
  int64_t count = 0;
  std::vector<WorkValue> inputs{}, outputs{};
};

enum class WorkPrecision { fp32, fp16, bf16, fp64, other };
inline constexpr size_t kWorkPrecisions = 5;

struct Work {
  std::array<int64_t, kWorkPrecisions> flops{};  ///< by WorkPrecision; a multiplication and an addition are two
  int64_t memory_bytes = 0;                      ///< each input is read once, each output written once
  int64_t launches = 0;
  int64_t not_metered = 0;  ///< operators of which only the bytes are known although they are matrix products

  int64_t all_flops() const;
  Work& operator+=(const Work& other);
};

/// A line of a meter's file (extension/record/work_meter.h). Throws Error(ErrorKind::input) if it is none.
MeteredOperator parse_metered_operator(std::string_view line);

/// The work of all `count` calls.
Work work_of(const MeteredOperator& metered);

/// The sum of the operators of one step.
Work work_of_step(const std::vector<MeteredOperator>& operators, int64_t step);

}  // namespace oomdiag
