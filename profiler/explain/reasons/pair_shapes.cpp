#include "profiler/explain/reasons/pair_shapes.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <span>
#include <vector>

#include "profiler/explain/causes/causes.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/words/shape.h"
#include "profiler/replay/history.h"

namespace oomdiag {
namespace {

bool is_of_size(int64_t a, int64_t b) {
  constexpr int64_t kBlock = 512;
  return a >= b && a - b < kBlock;
}

/// Where the failed request is an op's workspace: what that op made at this line before. Else what was requested.
int64_t bytes_of_result(const ReasonFacts& facts, const OutOfMemory& failed) {
  if (facts.cause != CauseKind::workspace) return failed.requested_bytes;
  const Share made = sum_blocks(facts, [&](const LiveBlock& block) {
    return is_same_call(block.made, failed.where) && block.category != Category::workspace;
  });
  return made.largest != nullptr ? made.largest->requested_bytes : failed.requested_bytes;
}

Where find_first_alike(const ReasonFacts& facts, int64_t result_bytes) {
  const auto& step = facts.device.step_allocations.blocks;
  const auto first = std::ranges::find_if(step, [&](const StepAllocation& block) {
    return block.is_of_step() && is_of_as_many(block.requested_bytes, result_bytes);
  });
  return first == step.end() ? Where{} : first->made;
}

std::string text_of(const std::vector<int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

constexpr int64_t kManyRows = 500;
constexpr int64_t kMaxColumnsOfBoxes = 8;
constexpr int64_t kItems[] = {4, 2, 8, 1};  ///< bytes of an element, usual ones first

/// Shapes of rows that live, weights left out: the product x @ weight.T is no pair of rows.
std::set<std::vector<int64_t>> list_rows(const ReasonFacts& facts) {
  std::set<std::vector<int64_t>> shapes;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const std::vector<int64_t> shape = parse_shape(block.shape);
    const bool is_weight = is_of_models(block.category);
    if (!is_weight && shape.size() >= 2 && shape[shape.size() - 2] >= kManyRows) shapes.insert(shape);
  }
  return shapes;
}

/// Shapes of weights with many rows: embeddings, and layers with as many outputs.
std::set<std::vector<int64_t>> list_tables(const ReasonFacts& facts) {
  std::set<std::vector<int64_t>> shapes;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const std::vector<int64_t> shape = parse_shape(block.shape);
    const bool is_table = block.category == Category::parameter && shape.size() == 2 && shape[0] >= kManyRows;
    if (is_table && shape[0] > 4 * shape[1]) shapes.insert(shape);
  }
  return shapes;
}

/// So many elements as rows of `a` × rows of `b`; of other ops than products also × columns of `a`.
std::optional<Square> factor_rows(const std::vector<int64_t>& a, const std::vector<int64_t>& b, int64_t bytes,
                                  int64_t item, bool of_product) {
  std::vector<int64_t> pairs(a.begin(), a.end() - 1);
  pairs.push_back(b[b.size() - 2]);
  const int64_t width = of_product ? 1 : a.back();
  if (width > 1) pairs.push_back(width);
  int64_t elements = item;
  for (const int64_t size : pairs) elements *= size;
  if (!is_of_size(bytes, elements)) return {};
  return Square{.text = "the result is " + text_of(pairs),
                .has_width = width > 1,
                .bytes = bytes,
                .batched = a.size() > 2 && a.back() >= 16 && width == 1,
                .of_columns = !of_product && a.back() == 1};  // else the result had the columns of b
}

/// What `factor(a, b, item)` finds for a and b of `list`, of usual types first: best two columns, which are exactly as long.
template <class List, class Factor>
Square find_factors(const List& list, const Factor& factor, std::span<const int64_t> items = kItems) {
  Square found;
  for (const int64_t item : items) {
    for (const auto& a : list) {
      for (const auto& b : list) {
        const std::optional<Square> square = factor(a, b, item);
        if (square && square->of_columns) return *square;
        if (square && found.text.empty()) found = *square;
      }
    }
    if (!found.text.empty()) break;
  }
  return found;
}

/// The same as every row of a table with every other one; outside of any layer also as rows of another tensor with those of the table.
Square factor_tables(const ReasonFacts& facts, int64_t bytes) {
  const std::set<std::vector<int64_t>> tables = list_tables(facts);
  const bool is_outside_of_layers = failed_in(facts).module.empty();
  std::set<std::vector<int64_t>> rows = is_outside_of_layers ? list_rows(facts) : std::set<std::vector<int64_t>>();
  rows.insert(tables.begin(), tables.end());
  return find_factors(rows, [&](const auto& a, const auto& b, int64_t item) {
    const bool is_of_table = a == b || (is_outside_of_layers && tables.contains(b));
    return is_of_table ? factor_rows(a, b, bytes, item, true) : std::nullopt;
  });
}

struct Rows {
  int64_t a = 0, b = 0, width = 1, columns = 1;
};

/// n × m × width of operands of n × d and m × d elements: of a product width is 1, of a difference d, and of boxes half of d. The bytes
/// may be those of a block, which is rounded up.
std::optional<Rows> factor_elements(int64_t bytes, int64_t item, int64_t a, int64_t b, bool of_product) {
  if (bytes < item || a <= 0 || b <= 0 || a > (int64_t{1} << 59) / b) return {};
  const double ratio = static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(item) /
                       static_cast<double>(bytes);  // d² / width
  const int64_t root = std::llround(std::sqrt(ratio)), whole = std::llround(ratio);
  const auto options = of_product ? std::vector{std::pair{root, int64_t{1}}}
                                  : std::vector{std::pair{whole, whole}, std::pair{whole / 2, whole / 4}};
  for (const auto& [columns, width] : options) {
    if (columns <= 0 || width <= 0) continue;
    if (width < columns && !of_product && columns > kMaxColumnsOfBoxes) continue;
    if (a % columns != 0 || b % columns != 0 || a / columns < kManyRows || b / columns < kManyRows) continue;
    const Rows rows{.a = a / columns, .b = b / columns, .width = width, .columns = columns};
    if (is_of_size(bytes, rows.a * rows.b * rows.width * item)) return rows;
  }
  return {};
}

/// The same of two tensors of which only the sizes are known.
std::optional<Square> factor_pair(const LiveBlock& a, const LiveBlock& b, int64_t bytes, int64_t item,
                                  bool of_product) {
  for (const int64_t type : {4, 2, 8}) {
    if (a.requested_bytes % type != 0 || b.requested_bytes % type != 0) continue;
    const auto rows = factor_elements(bytes, item, a.requested_bytes / type, b.requested_bytes / type, of_product);
    if (!rows) continue;
    std::vector<int64_t> shape{rows->a, rows->b};
    if (rows->width > 1) shape.push_back(rows->width);
    return Square{.text = "the result is as large as " + text_of(shape),
                  .has_width = rows->width > 1,
                  .bytes = bytes,
                  .of_columns = !of_product && rows->columns == 1};
  }
  return {};
}

/// Bytes of an element, where a comparison has made as many results of one byte; else 0.
int64_t find_item(const Expansion& expansion, int64_t bytes) {
  const auto compares = [](const LiveBlock* block) {
    return any_op(block->made, {"aten::eq", "aten::ne", "aten::lt", "aten::le", "aten::gt", "aten::ge"});
  };
  const auto made = std::ranges::find_if(expansion.alike, compares);
  return made == expansion.alike.end() ? 0 : bytes / (*made)->requested_bytes;
}

/// The shape of what lives of as many elements, where it is known and has two dimensions of many rows, or is a matrix of many.
std::vector<int64_t> find_shape_alike(const Expansion& expansion) {
  constexpr int64_t kFewestOfOthers = 64;
  for (const LiveBlock* block : expansion.alike) {
    std::vector<int64_t> shape = parse_shape(block->shape);
    const auto rows = std::ranges::count_if(shape, [](int64_t size) { return size >= kManyRows; });
    const bool is_matrix = shape.size() == 2 && rows == 1 && std::min(shape[0], shape[1]) >= kFewestOfOthers;
    if (rows >= 2 || is_matrix) return shape;
  }
  return {};
}

}  // namespace

std::optional<Expansion> find_expansion(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->phase == Phase::optimizer) return {};
  const int64_t result_bytes = bytes_of_result(facts, *failed);
  Expansion found{
      .bytes = failed->requested_bytes, .failed = failed->where, .first = find_first_alike(facts, result_bytes)};
  std::set<int64_t> sizes;
  for (const LiveBlock& block : facts.device.state.blocks) {
    // A weight of as many elements may be the operand: copies of weights, and what optimizers make, are no pairs.
    if (is_of_models(block.category) && is_of_as_many(block.requested_bytes, result_bytes)) return {};
    if (!is_data(block)) continue;
    const bool alike = is_of_as_many(block.requested_bytes, result_bytes);
    if (alike) {
      found.alike.push_back(&block);
    } else if (sizes.insert(block.requested_bytes).second) {
      found.others.push_back(&block);
    }
    found.bytes += alike ? block.bytes : 0;
    if (!alike) found.largest_other_bytes = std::max(found.largest_other_bytes, block.requested_bytes);
  }
  // Pairs of them are looked at.
  constexpr size_t kMaxOthers = 64;
  std::ranges::sort(found.others, std::greater{}, &LiveBlock::requested_bytes);
  if (found.others.size() > kMaxOthers) found.others.resize(kMaxOthers);
  int64_t smallest = result_bytes;
  for (const LiveBlock* block : found.alike) smallest = std::min(smallest, block->requested_bytes);
  if (found.largest_other_bytes * 4 > smallest || !is_large(facts, found.bytes)) return {};
  return found;
}

Square factor_shapes(const ReasonFacts& facts, int64_t bytes, bool of_product) {
  return find_factors(list_rows(facts), [&](const auto& a, const auto& b, int64_t item) {
    return factor_rows(a, b, bytes, item, of_product);
  });
}

Square factor_heads(const ReasonFacts& facts, int64_t bytes) {
  constexpr int64_t kMaxHeads = 4096;
  return find_factors(list_rows(facts), [&](const auto& a, const auto& b, int64_t item) -> std::optional<Square> {
    const int64_t rows = a.size() == 2 ? a.front() : 0;
    if (a != b || rows == 0 || bytes % (item * rows) != 0) return {};
    const int64_t length = bytes / (item * rows);
    const int64_t heads = length > 0 && rows % length == 0 ? rows / length : 0;
    if (length < kManyRows || heads < 2 || heads > kMaxHeads) return {};
    return Square{
        .text = "the result is as large as " + text_of({heads, length, length}), .bytes = bytes, .batched = true};
  });
}

Square factor_sizes(const Expansion& expansion, int64_t bytes, bool of_product) {
  const auto factor = [&](const LiveBlock* a, const LiveBlock* b, int64_t item) {
    return factor_pair(*a, *b, bytes, item, of_product);
  };
  const int64_t item = find_item(expansion, bytes);
  return item > 0 ? find_factors(expansion.others, factor, std::span(&item, 1))
                  : find_factors(expansion.others, factor);
}

Square factor_result(const ReasonFacts& facts, const Expansion& expansion, bool of_product) {
  const std::vector<int64_t> known = find_shape_alike(expansion);
  std::vector<int64_t> sizes{requested_bytes(facts)};
  for (const LiveBlock* block : expansion.alike) {
    if (std::ranges::find(sizes, block->requested_bytes) == sizes.end()) sizes.push_back(block->requested_bytes);
  }
  for (const int64_t bytes : sizes) {
    Square square = factor_shapes(facts, bytes, of_product);
    if (square.text.empty()) square = factor_sizes(expansion, bytes, of_product);
    if (square.text.empty() && of_product) square = factor_tables(facts, bytes);
    if (square.text.empty()) continue;
    if (!known.empty()) {
      square.text = "the result is " + text_of(known);
      square.has_width = known.size() > 2;
    }
    return square;
  }
  return {};
}

}  // namespace oomdiag
