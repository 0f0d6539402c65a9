// By hand: learns a program's memory from traces, and compares what the function says of other points with traces of runs there.
//
//   oomdiag_bench_shapes 4,128=a/trace 16,256=b/trace 25,64=c/trace -- 7,200=d/trace 9,512=e/trace
//
// The numbers are the varied dimensions. All runs on a GPU with more memory than they need. Prints a line for each point, and
// how many points a second can be computed.

#include <fmt/format.h>

#include <ctime>
#include <sstream>
#include <string>
#include <vector>

#include "profiler/shape_function/evaluate.h"

namespace oomdiag {
namespace {

constexpr int64_t kEnough = int64_t{1} << 50;

ShapeSample read_sample(const std::string& text) {
  const size_t equals = text.find('=');
  ShapeSample sample{.sequence = read_allocation_sequence(read_trace(text.substr(equals + 1)))};
  std::stringstream numbers(text.substr(0, equals));
  for (std::string number; std::getline(numbers, number, ',');) sample.point.push_back(std::stoll(number));
  return sample;
}

/// What the run itself did: the allocator's algorithm on its own sizes.
ShapeEstimate measure(const ShapeSample& sample, size_t steps) {
  ShapeSample cut = sample;
  if (steps > 0) cut.sequence.cut(steps);
  return evaluate(ShapeFunction::learn({cut}), sample.point, kEnough);
}

void compare(const ShapeFunction& function, const std::string& text) {
  const ShapeSample sample = read_sample(text);
  const ShapeEstimate said = evaluate(function, sample.point, kEnough);
  const ShapeEstimate did = measure(sample, function.structures().front().sequence.step_ends.size());
  fmt::print(
      "{:<24} allocated {} {} reserved {} {} {}\n", text.substr(0, text.find('=')), said.peak_allocated_bytes,
      said.peak_allocated_bytes == did.peak_allocated_bytes ? "equal" : fmt::format("not {}", did.peak_allocated_bytes),
      said.peak_reserved_bytes,
      said.peak_reserved_bytes == did.peak_reserved_bytes ? "equal" : fmt::format("not {}", did.peak_reserved_bytes),
      said.is_exact() ? "exact"
                      : fmt::format("{}{}({}, {} bytes)", said.allocated_is_exact ? "" : "allocated ",
                                    said.reserved_is_exact ? "" : "reserved ", said.doubt, said.doubtful_bytes));
}

/// The rules that are no polynomials, with a place of each.
void list_unknown(const ShapeFunction& function) {
  std::vector<bool> listed(function.rules().size());
  for (const auto& one : function.structures()) {
    for (size_t a = 0; a < one.rules.size(); ++a) {
      const SizeRule& rule = function.rules()[one.rules[a]];
      if (rule.exact || listed[one.rules[a]]) continue;
      listed[one.rules[a]] = true;
      std::string sizes;
      for (size_t i = 0; i < rule.sizes.size(); ++i) sizes += fmt::format(" {}:{}", rule.points[i][0], rule.sizes[i]);
      fmt::print("  no polynomial:{}  {}\n", sizes, one.sequence.places[one.sequence.allocations[a].context]);
    }
  }
}

void time(const ShapeFunction& function) {
  const std::clock_t begin = std::clock();  // of the processor, which others may use as well
  int points = 0;
  for (; std::clock() - begin < CLOCKS_PER_SEC; ++points) {
    const std::vector<ShapePoint>& learned = function.structures().front().points;
    ShapePoint point = learned[static_cast<size_t>(points) % learned.size()];
    point[0] += 1 + points % 7;
    evaluate(function, point, kEnough);
  }
  fmt::print("{} points a second, of {} allocations and {} sizes\n", points,
             function.structures().front().sequence.allocations.size(), function.rules().size());
}

int bench(const std::vector<std::string>& arguments) {
  std::vector<ShapeSample> samples;
  size_t i = 0;
  for (; i < arguments.size() && arguments[i] != "--"; ++i) samples.push_back(read_sample(arguments[i]));
  const ShapeFunction function = ShapeFunction::learn(std::move(samples));
  if (!function.unknown().empty()) {
    fmt::print("not known: {}\n", function.unknown());
    return 1;
  }
  list_unknown(function);
  for (++i; i < arguments.size(); ++i) compare(function, arguments[i]);
  time(function);
  return 0;
}

}  // namespace
}  // namespace oomdiag

int main(int argc, char** argv) { return oomdiag::bench({argv + 1, argv + argc}); }
