#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "profiler/explain/bytes_text.h"
#include "profiler/explain/fix_rules.h"
#include "profiler/explain/reason_evidence.h"
#include "profiler/explain/reason_rules.h"
#include "profiler/explain/reasons.h"
#include "profiler/one_of.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/history.h"

// Rows of kReasons about copies: rows that are repeated before the layers, and results of elementwise ops that are alive beside what
// they were made of.

namespace oomdiag {
namespace {

bool repeats_rows(const Where& where) {
  return is_one_of(where.op, {"aten::repeat", "aten::repeat_interleave", "aten::tile"}) && where.module.empty();
}

/// How many of the second are as large as the first; 0 if it is no multiple, or too many.
int64_t count_copies(int64_t bytes, int64_t of_bytes) {
  constexpr int64_t kMostCopies = 1024;
  if (of_bytes <= 0 || bytes % of_bytes != 0) return 0;
  const int64_t copies = bytes / of_bytes;
  return copies <= kMostCopies ? copies : 0;
}

/// The copies of something that is still there, and not of a weight.
struct Repetition {
  const LiveBlock* result = nullptr;
  int64_t copies = 0;
};

Repetition find_repetition(const ReasonFacts& facts) {
  constexpr int64_t kFewest = 2, kWorthLooking = 1 << 20;
  const auto& blocks = facts.device.state.blocks;
  std::set<int64_t, std::greater<>> sizes;  // of data: the largest that fits several times is copied fewest times
  for (const LiveBlock& block : blocks) {
    const bool is_data = !is_of_models(block.category) && !block.pending_free && block.bytes >= kWorthLooking;
    if (is_data) sizes.insert(block.requested_bytes);
  }
  Repetition found;
  for (const LiveBlock& result : blocks) {
    const bool is_larger = found.result == nullptr || result.bytes > found.result->bytes;
    if (!repeats_rows(result.made) || result.bytes < kWorthLooking || !is_larger) continue;
    const auto operand = std::ranges::find_if(
        sizes, [&](int64_t bytes) { return count_copies(result.requested_bytes, bytes) >= kFewest; });
    if (operand != sizes.end()) found = {&result, count_copies(result.requested_bytes, *operand)};
  }
  return found;
}

bool is_elementwise(const Where& where) {
  return where.node.empty() &&
         is_one_of(where.op, {"aten::to",    "aten::_to_copy", "aten::add",   "aten::sub",       "aten::mul",
                              "aten::div",   "aten::rsub",     "aten::clamp", "aten::clamp_min", "aten::clamp_max",
                              "aten::exp",   "aten::log",      "aten::sqrt",  "aten::rsqrt",     "aten::pow",
                              "aten::neg",   "aten::abs",      "aten::round", "aten::floor",     "aten::sign",
                              "aten::where", "aten::sin",      "aten::cos",   "aten::square",    "aten::reciprocal",
                              "aten::tanh",  "aten::sigmoid"});
}

/// Whether the block is as large as what was requested, but for rounding.
bool is_of_requested_size(const LiveBlock& block, const OutOfMemory& failed) {
  return std::abs(block.requested_bytes - failed.requested_bytes) < kMinBlockBytes;
}

/// "train.py:31, 32, 33" of lines of one file.
std::string name_lines(const std::set<std::string>& places) {
  std::string text, file;
  for (const std::string& place : places) {
    const std::string before = place.substr(0, place.rfind(':'));
    const std::string shown = before == file ? place.substr(std::min(place.size(), before.size() + 1)) : place;
    text += text.empty() ? shown : ", " + shown;
    file = before;
  }
  return text;
}

/// An elementwise op whose operand lives on: its result is a second tensor of the same size, and in place it would be none.
Found find_second_tensor(const ReasonFacts& facts) {
  const OutOfMemory& failed = *failure(facts);
  if (is_one_of(failed.where.op, {"aten::rsub", "aten::where"}))
    return {};  // no method of a tensor does these in place
  const Share operand = sum_blocks(facts, [&](const LiveBlock& block) {
    return !is_of_models(block.category) && is_of_requested_size(block, failed);
  });
  const Referrer* const referrer = operand.largest == nullptr ? nullptr : facts.referrers.find(*operand.largest);
  if (referrer == nullptr || is_copy(failed.where.op) || !is_large(facts, 2 * failed.requested_bytes, 0.5)) return {};
  const std::string_view name = variable_name(referrer->variable);
  const std::string_view op = failed.where.op.substr(failed.where.op.rfind(':') + 1);
  return Reason{.id = {},
                .text = fmt::format("{}{} makes a second tensor of {} beside {}", failed.where.op, at(failed.where),
                                    with_unit(failed.requested_bytes), referrer->variable),
                .bytes = failed.requested_bytes,
                .fix = "in_place",
                .how = {fmt::format("{}.{}_(…)  # in place: no second tensor; or {} on the host from the beginning",
                                    name, op, name)}};
}

}  // namespace

Found find_repeated_rows(const ReasonFacts& facts) {
  const Repetition repetition = find_repetition(facts);
  if (repetition.result == nullptr || learns(facts)) return {};
  const Share alike = sum_blocks(facts, [&](const LiveBlock& block) {
    return !is_of_models(block.category) && block.requested_bytes == repetition.result->requested_bytes;
  });
  const bool asks = is_of_as_many(requested_bytes(facts), repetition.result->requested_bytes);
  const int64_t bytes = alike.bytes + (asks ? requested_bytes(facts) : 0);
  if (alike.count < 3 || !is_large(facts, bytes, 0.5)) return {};
  const Where& where = repetition.result->made;
  return Reason{.id = {},
                .text = fmt::format("{}{} copies rows, and what follows is as large: {} tensors of {}", where.op,
                                    at(where), alike.count, with_unit(repetition.result->bytes)),
                .bytes = bytes - bytes / repetition.copies,
                .fix = "repeat_later"};
}

Found find_elementwise_copies(const ReasonFacts& facts) {
  constexpr int64_t kFewest = 2;
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || !is_elementwise(failed->where) || builds_graph(facts).value_or(false)) return {};
  std::set<std::string> places{short_place(failed->where)};
  const Share alike = sum_blocks(facts, [&](const LiveBlock& block) {
    const bool is_result = is_elementwise(block.made) && block.made.module == failed->where.module &&
                           !is_of_models(block.category) && block.step == failed->step &&
                           is_of_requested_size(block, *failed);
    if (is_result) places.insert(short_place(block.made));
    return is_result;
  });
  const int64_t bytes = alike.bytes + failed->requested_bytes;
  if (alike.count < kFewest) return find_second_tensor(facts);
  if (!is_large(facts, bytes, 0.5)) return {};
  return Reason{
      .id = {},
      .text = fmt::format("{} results of elementwise ops, {} each, are alive at once ({}): {}", alike.count + 1,
                          with_unit(failed->requested_bytes), name_lines(places), with_unit(bytes)),
      .bytes = bytes - bytes / (alike.count + 1),
      .fix = "in_place"};
}

}  // namespace oomdiag
