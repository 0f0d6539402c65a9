#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/device/device.h"
#include "cli/device/gpus.h"
#include "cli/experiments/border_search.h"
#include "cli/experiments/experiment.h"
#include "cli/launch/steady.h"
#include "profiler/shape_function/single_call.h"

// oomdiag fit: the largest value and the smallest GPU, found by runs. Values here, the stages in fit_*.cpp.
namespace oomdiag {

/// What --vary says: "batch=1..65536", "batch=8..512:8", "batch=1..1024:pow2" or "seq=128,256,512".
struct Variable {
  std::string name;
  int64_t least = 0, most = 0, step = 1;  ///< step 0 = powers of two
  std::vector<int64_t> list{};            ///< in place of a range, ascending

  int64_t count() const;
  int64_t value(int64_t position) const;
  /// The last position whose value is not above this one; the first if none is.
  int64_t position_of(double value) const;
  bool operator==(const Variable&) const = default;
};

/// Throws Error(usage).
Variable parse_variable(const std::string& text);

using Values = std::map<std::string, int64_t>;

/// "batch=48,seq=1024": a value for each of the variables. Throws Error(usage).
Values parse_values(const std::string& text, std::span<const Variable> variables);

/// "batch = 8, seq = 128".
std::string describe(const Values& values);

/// Every combination of the values of these variables.
std::vector<Values> combine(std::span<const Variable> variables);

/// `program` with each {name} replaced by its value.
std::vector<std::string> fill_in(std::vector<std::string> program, const Values& values);

struct FitRequest {
  std::vector<std::string> program{};
  DeviceChoice device{};
  uint32_t steps = 0;   ///< 0 = found
  bool to_end = false;  ///< each run goes to the program's end, however long that takes
  int count = 1;        ///< GPUs of a virtual host
  int most_runs = 12;   ///< for one border, unless it takes more to find it at all
  /// What a run with these values is to be given of extension/python/fixes: [id, settings] each. Unset: nothing.
  std::function<nlohmann::json(const Values&)> fixes_of{};
};

/// One run of a search.
struct FitRun {
  Values values;
  int64_t memory_bytes = 0;  ///< of the GPU, 0 = its own
  Experiment experiment;
  bool learns = false;    ///< made to learn sizes from, on a GPU with more memory than any program needs
  bool goes_on = false;   ///< was not to be ended before kLongestRun
  int64_t gpu_bytes = 0;  ///< of the GPU that is asked about; 0 = a real one

  /// Nothing ended it before the program's own end, or its failure.
  bool is_whole() const { return experiment.stopped_at_step == 0; }
};

/// What a run shows of the GPU that is asked about.
enum class Fits { yes, no, unknown };
/// One that had more memory shows that its values fit where all that it reserved is there, and that they do not where what it
/// allocated is not. In between the allocator decides, which gives cached segments back on a full GPU.
Fits fits(const FitRun& run);

/// How long a run goes on that is to show whether what fits when its peak is steady fits to the program's end.
inline constexpr std::chrono::seconds kLongestRun{60};

/// Runs and remembers.
class Fitter {
 public:
  Fitter(const FitRequest& request, Experiments& experiments, std::function<void(std::size_t)> on_done)
      : request_(request), experiments_(experiments), on_done_(std::move(on_done)) {}

  /// Runs with these, beside each other. Throws Error(environment) if the program fails for another reason than memory;
  /// Interrupted, and then runs() has what was over.
  std::vector<FitRun> run(const std::vector<std::pair<Values, int64_t>>& cases);
  /// The same on the largest GPU, with their allocations.
  std::vector<FitRun> learn(const std::vector<Values>& cases);
  /// On the GPU itself, with their allocations where they pass.
  std::vector<FitRun> prove(const std::vector<Values>& cases);
  /// What each of these operator calls (see OpCalls) requests when it is made alone, on the largest GPU. One process makes those that
  /// were not made before; none is made where the program is not one of Python.
  std::vector<MadeAlone> make_alone(const std::vector<std::string>& calls);
  /// How many there were.
  std::size_t calls_alone() const {
    return static_cast<std::size_t>(
        std::ranges::count_if(made_alone_, [](const auto& one) { return one.second.has_value(); }));
  }
  const std::vector<FitRun>& runs() const { return runs_; }
  /// The run with these values on the GPU itself, or null.
  const FitRun* find_on_gpu(const Values& values) const;
  /// Whether what passes until its peak is steady passes to the program's end, too, or for kLongestRun: runs it so far, unless
  /// a run went there or --steps says how far they go. Where it fails later, runs go that far from now on, and after a second
  /// time all go on: search again.
  bool holds_to_end(const Values& values, int64_t memory_bytes);
  /// Whether it went as far as runs go now.
  bool is_far_enough(const FitRun& run) const;
  /// How many values are worth trying together.
  int at_once() const;
  int most_runs() const { return request_.most_runs; }
  /// Memory of the virtual GPU; 0 where it is a real one.
  int64_t gpu_bytes() const;

 private:
  enum class Purpose { search, learn, prove, go_on };
  SteadyRule rule_for(Purpose purpose) const;
  std::vector<FitRun> run_for(Purpose purpose, const std::vector<std::pair<Values, int64_t>>& cases);

  const FitRequest& request_;
  Experiments& experiments_;
  std::function<void(std::size_t)> on_done_;
  std::vector<FitRun> runs_;
  std::map<std::string, MadeAlone> made_alone_;
  uint32_t least_steps_ = 0;  ///< which runs go at least, as one failed there
  bool all_go_on_ = false;
};

class MemoryFunction;

/// The largest value of the first variable, with `others` as they are.
struct LargestValue {
  Values others;
  std::optional<int64_t> value{};  ///< nullopt: the least fails
  bool is_last_of_range = false;
  std::vector<int64_t> failed_above{};  ///< that were run and failed
  bool may_pass_above = false;          ///< far above, as BorderSearch says
  std::string formula{};       ///< of its peak, where that is known as a function: "0.97 GiB + 1.64 GiB·batch"
  bool as_computed = false;    ///< the border was computed, and runs on both sides of it confirmed it
  int64_t computed_bytes = 0;  ///< allocated at its peak, by the function
  std::string doubt{};         ///< why it was not computed, or which size is no polynomial
  std::optional<Line> line{};
};
/// By `function` where it is known and its border holds, else by runs alone.
LargestValue find_largest_value(Fitter& fitter, const Variable& variable, const Values& others,
                                const std::optional<Line>& prior, MemoryFunction& function, bool may_believe = false);

struct SmallestGpu {
  int64_t bytes = 0;  ///< 0: it passes on none
  int64_t non_pytorch_bytes = 0;
  bool takes_share = false;  ///< of whatever GPU it runs on: it needs less than it takes on a larger one
  std::string fails_in{};    ///< with a page less
  std::optional<GpuEntry>
      card{};  ///< the smallest on which that much is there beside its context; unset: none, or not asked
};
SmallestGpu find_smallest_gpu(Fitter& fitter, const Values& values);

}  // namespace oomdiag
