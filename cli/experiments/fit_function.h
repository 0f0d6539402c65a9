#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/experiments/experiment.h"
#include "cli/experiments/fit.h"
#include "profiler/export/surface_picture.h"
#include "profiler/shape_function/allocation_sequence.h"
#include "profiler/shape_function/evaluate.h"
#include "profiler/shape_function/polynomial.h"
#include "profiler/shape_function/shape_function.h"

namespace oomdiag {

/// The memory of a program as a function of the variables of a search, learned from a few runs on the largest GPU.
class MemoryFunction {
 public:
  /// One that knows nothing, and why.
  explicit MemoryFunction(std::string unknown = "") : unknown_(std::move(unknown)) {}

  /// Runs the program four times for one variable, six times for two, and learns. Not known where the GPU is a real one, the
  /// first variable has few values, or three variables vary.
  static MemoryFunction learn(Fitter& fitter, std::span<const Variable> variables);
  /// From one run without variables: how the allocator would get along on other GPUs.
  static MemoryFunction of_one_run(const Experiment& experiment);

  bool is_known() const { return unknown_.empty(); }
  const std::string& unknown() const { return unknown_; }

  /// What a run with these values would do on a GPU of this size.
  ShapeEstimate estimate(const Values& values, int64_t gpu_bytes) const;
  /// What PyTorch may take of a GPU of this size.
  int64_t available_bytes(int64_t gpu_bytes) const;
  /// Makes the operator calls alone whose sizes no polynomial gives with these values; those are known from then on.
  void learn_calls(Fitter& fitter, std::span<const Values> all);
  /// Of the peak with these values.
  std::string formula(const Values& values) const;
  /// One more run, on the GPU itself.
  void add(const Values& values, const AllocationSequence& allocations);
  /// Runs on both sides of a border showed to the byte what was computed: other borders without a doubt are believed.
  bool is_confirmed() const { return confirmed_; }
  void confirm() { confirmed_ = true; }

 private:
  ShapePoint point_of(const Values& values) const;
  void relearn();

  std::vector<std::string> names_{};  ///< of those that vary
  std::vector<ShapeSample> samples_{};
  ShapeFunction function_{};
  int64_t non_pytorch_bytes_ = 0;
  std::string unknown_{};
  bool confirmed_ = false;
};

/// The largest value that fits by the function alone; nullopt if none does.
std::optional<int64_t> compute_largest(const MemoryFunction& function, const Variable& variable, const Values& others,
                                       int64_t gpu_bytes);

/// The largest value by the function, with runs on both sides of the border as proof; `may_believe`: where the function is confirmed
/// and has no doubt, without. nullopt where these show something else, and `function` then knows no more than that.
std::optional<LargestValue> find_largest_by_function(Fitter& fitter, const Variable& variable, const Values& others,
                                                     MemoryFunction& function, bool may_believe = false);

/// The peak over the first two variables, for a picture: a grid that ends somewhat above the largest border.
Surface compute_surface(MemoryFunction& function, const Variable& x, const Variable& y, Fitter& fitter);

/// How many pages below the smallest GPU are looked at, too: what fits is not monotone in the size of the GPU.
inline constexpr int64_t kPagesBelow = 4;

/// The smallest multiple of `page_bytes` on which the function passes, and on no GPU that is up to kPagesBelow pages smaller.
int64_t find_smallest_gpu_by_function(const MemoryFunction& function, const Values& values, int64_t least, int64_t most,
                                      int64_t page_bytes);

}  // namespace oomdiag
