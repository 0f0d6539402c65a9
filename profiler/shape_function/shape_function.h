#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "profiler/shape_function/allocation_sequence.h"
#include "profiler/shape_function/polynomial.h"

namespace oomdiag {

/// A run that the function is learned from.
struct ShapeSample {
  ShapePoint point{};
  AllocationSequence sequence{};
};

/// How the size of some allocations follows from the dimensions.
struct SizeRule {
  bool exact = false;  ///< `polynomial` gave every run, also those that it was not made from
  Polynomial polynomial{};
  /// Where no polynomial does (a kernel's workspace, rounding, data): what the runs showed, of which the nearest two count.
  std::vector<ShapePoint> points{};
  std::vector<int64_t> sizes{};

  int64_t at(const ShapePoint& point) const;
  bool operator==(const SizeRule&) const = default;
};

/// The allocations of a program as a function of its dimensions. Learned from a few runs, each of which is a template: what the
/// program does near its point. Where two templates differ in more than sizes there is a breakpoint between them.
class ShapeFunction {
 public:
  struct Template {
    ShapePoint point{};
    AllocationSequence sequence{};
    std::vector<uint32_t> rules{};  ///< of each allocation: index into rules()
    uint64_t structure = 0;         ///< equal where places and order of all allocations and frees are
  };

  /// Learns from these runs, of different points. `unknown` says why it could not.
  static ShapeFunction learn(std::vector<ShapeSample> samples);

  const std::string& unknown() const { return unknown_; }
  const std::vector<SizeRule>& rules() const { return rules_; }
  const std::vector<Template>& templates() const { return templates_; }
  /// The run whose point is nearest, by the ratios of the dimensions.
  const Template& nearest(const ShapePoint& point) const;
  /// Whether all runs did the same things in the same order.
  bool has_one_structure() const;
  /// Whether `point` and the run nearest to it have no breakpoint between them, as far as the other runs tell.
  bool is_within_structure(const ShapePoint& point) const;

 private:
  void find_rules();
  uint32_t rule_of(const SizeRule& samples);

  std::vector<Template> templates_;
  std::vector<SizeRule> rules_;
  std::string unknown_;
};

}  // namespace oomdiag
