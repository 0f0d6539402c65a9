#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace oomdiag {

/// The outermost operator calls of a run with their arguments. Calls that differ in whole numbers only (sizes, strides, dimensions)
/// have one form.
struct OpCalls {
  struct Call {
    uint32_t id = 0;                 ///< as in the trace's events
    uint32_t form = 0;               ///< index into `forms`
    std::vector<int64_t> numbers{};  ///< in the place of each '#' of the form
  };
  std::vector<Call> calls{};  ///< by ascending id
  std::vector<std::string> forms{};

  /// Index into `calls`; kNone where that call is not known.
  uint32_t find(uint32_t id) const;
  static constexpr uint32_t kNone = ~uint32_t{0};
};

/// From a file that extension/record/op_arguments.h writes. Lines that are none, as the last one of a program that was killed, are
/// left out.
OpCalls read_op_calls(std::istream& lines);

/// The call as it was written: `form` with a number for each '#'.
std::string write_op_call(const std::string& form, const std::vector<int64_t>& numbers);

}  // namespace oomdiag
