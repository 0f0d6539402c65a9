#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/device/device.h"
#include "cli/experiments/border_search.h"
#include "cli/experiments/experiment.h"
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
  uint32_t steps = 0;  ///< 0 = found
  int most_runs = 12;  ///< for one border, unless it takes more to find it at all
  /// What a run with these values is to be given of extension/python/fixes: [id, settings] each. Unset: nothing.
  std::function<nlohmann::json(const Values&)> fixes_of{};
};

/// One run of a search.
struct FitRun {
  Values values;
  int64_t memory_bytes = 0;  ///< of the GPU, 0 = its own
  Experiment experiment;
  bool learns = false;  ///< made to learn sizes from, on a GPU with more memory than any program needs
};

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
  /// How many values are worth trying together.
  int at_once() const;
  int most_runs() const { return request_.most_runs; }
  /// Memory of the virtual GPU; 0 where it is a real one.
  int64_t gpu_bytes() const;

 private:
  enum class Purpose { search, learn, prove };
  std::vector<FitRun> run_for(Purpose purpose, const std::vector<std::pair<Values, int64_t>>& cases);

  const FitRequest& request_;
  Experiments& experiments_;
  std::function<void(std::size_t)> on_done_;
  std::vector<FitRun> runs_;
  std::map<std::string, MadeAlone> made_alone_;
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
};
SmallestGpu find_smallest_gpu(Fitter& fitter, const Values& values);

}  // namespace oomdiag
