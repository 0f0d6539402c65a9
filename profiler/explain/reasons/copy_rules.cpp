#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/explain/words/short_place.h"
#include "profiler/one_of.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/history.h"

// Rows of kReasons about copies: rows that are repeated before the layers, and results of elementwise ops that are alive beside what
// they were made of.

namespace oomdiag {
namespace {

bool repeats_rows(const Where& where) { return repeats({.op = where.op}) && where.module.empty(); }

/// How many of the second are as large as the first; 0 if it is no multiple, or too many.
int64_t count_copies(int64_t bytes, int64_t of_bytes) {
  constexpr int64_t kMaxCopies = 1024;
  if (of_bytes <= 0 || bytes % of_bytes != 0) return 0;
  const int64_t copies = bytes / of_bytes;
  return copies <= kMaxCopies ? copies : 0;
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
  return Reason{
      .text = fmt::format("{}{} makes a second tensor of {} beside {}", failed.where.op, at(failed.where),
                          with_unit(failed.requested_bytes), referrer->variable),
      .bytes = failed.requested_bytes,
      .fix = "in_place",
      .how = {
          fmt::format("{}.{}_(…)  # in place: no second tensor; or {} on the host from the beginning", name, op, name),
          fmt::format("for part in {}.split(1024): …  # or rows in parts, the result of each where it goes", name)}};
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
  return Reason{.text = fmt::format("{}{} copies rows, and what follows is as large: {} tensors of {}", where.op,
                                    at(where), alike.count, with_unit(repetition.result->bytes)),
                .bytes = bytes - bytes / repetition.copies,
                .fix = "repeat_later"};
}

namespace {

/// What an op that repeats has made, and what it may have repeated, by how often.
struct Repeated {
  Where where{};
  int64_t bytes = 0;
  std::map<int64_t, const LiveBlock*> operands{};
};

/// How the program or its model calls it; or empty.
std::string name_of(const ReasonFacts& facts, const LiveBlock& block) {
  if (block.category == Category::buffer) return std::string(block.name);
  return variable_of(facts.referrers.find(block));
}

Repeated find_operands(const ReasonFacts& facts, const Where& where, int64_t bytes) {
  constexpr int64_t kFewest = 2, kFewestOfData = 4, kWorthLooking = 1 << 18;
  Repeated found{.where = where, .bytes = bytes};
  if (!repeats(where)) return found;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const int64_t copies = count_copies(bytes, block.requested_bytes);
    const bool is_buffer = block.category == Category::buffer;
    const bool may_be = (is_buffer || is_data(block)) && block.requested_bytes >= kWorthLooking;
    if (may_be && copies >= (is_buffer ? kFewest : kFewestOfData) && !name_of(facts, block).empty())
      found.operands.emplace(copies, &block);
  }
  return found;
}

/// Of the request that failed, else of a tensor that lives.
Repeated find_repeated(const ReasonFacts& facts) {
  Repeated found = find_operands(facts, failed_in(facts), requested_bytes(facts));
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (!found.operands.empty()) break;
    if (!block.pending_free) found = find_operands(facts, block.made, block.requested_bytes);
  }
  return found;
}

}  // namespace

// As a mask that is repeated for each sample of a batch, or words for each pair of them. Where tensors of several sizes may be what is
// repeated, none of them is named.
Found find_repeated_tensor(const ReasonFacts& facts) {
  if (failure(facts) == nullptr) return {};
  const Repeated repeated = find_repeated(facts);
  if (repeated.operands.empty()) return {};
  const auto is_alike = [&](int64_t bytes) { return is_of_as_many(bytes, repeated.bytes); };
  const Share alike = sum_blocks(facts, [&](const LiveBlock& block) { return is_alike(block.requested_bytes); });
  const bool asks = is_alike(requested_bytes(facts));
  const int64_t bytes = alike.bytes + (asks ? requested_bytes(facts) : 0);
  if (!is_large(facts, bytes, 0.4)) return {};
  const auto& [copies, operand] = *repeated.operands.begin();
  const std::string what =
      repeated.operands.size() > 1
          ? "copies a tensor many times"
          : fmt::format("copies {} {} {} times", name_of(facts, *operand),
                        operand->shape.empty() ? with_unit(operand->bytes) : std::string(operand->shape), copies);
  return Reason{
      .text = fmt::format("{}{} {}{}: {} in all", repeated.where.op, at(repeated.where), what,
                          alike.count + (asks ? 1 : 0) > 1 ? ", and what follows is as large" : "", with_unit(bytes)),
      .bytes = bytes / copies * (copies - 1),
      .fix = "repeat_later",
      .how = {"mask.to(dtype).expand(batch, -1, -1, -1)  # a view of the one tensor, in place of repeat()",
              "for part in index.split(64): …  # or as many copies at a time"}};
}

// In a layer: the program's own copies are large results.
Found find_expanded_copy(const ReasonFacts& facts) {
  constexpr int64_t kManyTimes = 4;
  if (!fails_in(facts, {"aten::reshape", "aten::contiguous", "aten::clone", "aten::flatten", "aten::grid_sampler"}))
    return {};
  const Where where = failed_in(facts);
  const int64_t bytes = requested_bytes(facts);
  if (where.module.empty() || !is_large(facts, bytes)) return {};
  int64_t largest = 0;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (!block.pending_free) largest = std::max(largest, block.requested_bytes);
  }
  if (largest * kManyTimes > bytes) return {};
  std::vector<std::string> how{
      "x.expand(n, -1, -1)[start:end]  # a part of the view at a time, in place of a copy of all"};
  if (where.op == "aten::grid_sampler")
    how = {
        "y = torch.cat([F.grid_sample(x, part) for part in grid.split(1)])  # x as it is, not expanded: a grid at a "
        "time"};
  return Reason{.text = fmt::format("{}{} writes out a tensor that was expanded or unfolded: {} of at most {}",
                                    where.op, at(where), with_unit(bytes), with_unit(largest)),
                .bytes = bytes,
                .fix = "repeat_later",
                .how = std::move(how)};
}

namespace {

/// Whether it adds up, and has yet to make numbers of 64 bits of the booleans that it adds up.
bool adds_up(const Where& where) {
  return is_one_of(where.op, {"aten::sum", "aten::cumsum", "aten::prod", "aten::mean", "aten::cumprod"}) &&
         is_one_of(where.inner, {"aten::empty_strided", "aten::to", "aten::_to_copy", "aten::empty_like"});
}

}  // namespace

Found find_large_cast(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || !is_large(facts, failed->requested_bytes)) return {};
  const bool is_sum = adds_up(failed->where);
  const bool is_from_host = std::ranges::any_of(facts.device.host_tensors, [&](const Referrer& one) {
    return is_of_as_many(one.bytes, failed->requested_bytes);
  });
  if (is_from_host && failed->where.module.empty()) return {};
  if (!is_sum && (!is_copy(failed->where.op) || builds_graph(facts).value_or(false))) return {};
  const Share operand = sum_blocks(facts, [&](const LiveBlock& block) {
    if (is_sum && !block.shape.ends_with(" bool")) return false;
    return is_data(block) && is_of_as_many(block.requested_bytes, failed->requested_bytes) &&
           block.requested_bytes * 3 < failed->requested_bytes * 2;
  });
  if (operand.largest == nullptr) return {};
  const Referrer* const referrer = facts.referrers.find(*operand.largest);
  return Reason{
      .text = fmt::format("{}{} makes a copy of {} in another type, {} times as large as {}{}", failed->where.op,
                          at(failed->where), with_unit(failed->requested_bytes),
                          failed->requested_bytes / std::max<int64_t>(1, operand.largest->requested_bytes),
                          referrer == nullptr ? "its tensor of " + with_unit(operand.largest->requested_bytes)
                                              : std::string(referrer->variable),
                          comma_shape(*operand.largest)),
      .bytes = failed->requested_bytes,
      .fix = "enlarge_in_parts",
      .how = {
          is_sum
              ? "mask.all(-1)  # or any(), count_nonzero(): these take booleans as they are; sum() of a part at a time"
              : "for part in masks.split(16): f(part.float())  # a part at a time, each reduced before the "
                "next; or .half()"}};
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
  if (alike.count < kFewest) {  // of a model that works on all at once each op is as large
    return find_large_batch(facts) ? Found{} : find_second_tensor(facts);
  }
  if (!is_large(facts, bytes, 0.5)) return {};
  return Reason{
      .text = fmt::format("{} results of elementwise ops, {} each, are alive at once ({}): {}", alike.count + 1,
                          with_unit(failed->requested_bytes), name_lines(places), with_unit(bytes)),
      .bytes = bytes - bytes / (alike.count + 1),
      .fix = "in_place"};
}

Found find_concatenated_results(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || !joins(failed->where) || !failed->where.module.empty()) return {};
  const Share before = sum_blocks(facts, [&](const LiveBlock& block) {
    const bool is_of_line = joins(block.made) && block.made.source == failed->where.source;
    return is_of_line && block.requested_bytes < failed->requested_bytes;
  });
  // What was joined the last time, and a little more: else parts are joined once.
  if (before.largest == nullptr || before.largest->requested_bytes * 2 < failed->requested_bytes) return {};
  const Referrer* const referrer = facts.referrers.find(*before.largest);
  // Of each layer one may be joined: all of the last time are there. Where tensors pile up, each may be a result of its own.
  const bool are_alike = before.largest->requested_bytes * 2 * before.count > before.bytes;
  const int64_t joined = are_alike && leading_growth(facts) == nullptr ? before.bytes : before.largest->bytes;
  const int64_t bytes = joined + failed->requested_bytes;
  // What no variable of the program leads to is a package's: the same line of it has joined both.
  const bool is_of_package = before.largest->bytes * 4 >= before.bytes * 3 && !failed->where.inner_source.empty() &&
                             before.made().inner_source == failed->where.inner_source &&
                             !fails_in_graph(facts).value_or(true);
  if ((referrer == nullptr && !is_of_package) || !is_large(facts, bytes)) return {};
  const std::string keeper = referrer == nullptr ? "" : fmt::format(" in {}", referrer->variable);
  return Reason{.text = fmt::format(
                    "results are concatenated on the GPU{}{}: {}{} so far, and both are there while {} joins them",
                    keeper, at(failed->where), with_unit(joined), comma_shape(*before.largest), failed->where.op),
                .bytes = bytes,
                .fix = "results_to_host",
                .how = {fmt::format("parts.append(output.cpu())  # and {} = torch.cat(parts) after the loop; or of "
                                    "each only what is used: topk, a mean",
                                    referrer == nullptr ? "y" : variable_name(referrer->variable))},
                .piles_up = true,
                .of_any_batch = true};
}

Found find_widened_weights(const ReasonFacts& facts) {
  constexpr int64_t kFewest = 2;
  const OutOfMemory* failed = failed_copy(facts);
  if (failed == nullptr) return {};
  std::string_view keeper;
  const Share copies = sum_blocks(facts, [&](const LiveBlock& block) {
    if (!is_copy(block.made.op) || block.made.source != failed->where.source) return false;
    const Referrer* const referrer = facts.referrers.find(block);
    if (module_of(referrer).empty()) return false;
    keeper = module_of(referrer);
    return true;
  });
  // The one that is being copied is still there, half as large.
  const Share original = sum_blocks(facts, [&](const LiveBlock& block) {
    const Referrer* const referrer = facts.referrers.find(block);
    return block.requested_bytes * 2 == failed->requested_bytes && block.made.source != failed->where.source &&
           (referrer == nullptr || module_of(referrer) == keeper);
  });
  if (copies.count < kFewest || original.count == 0 || !is_large(facts, copies.bytes)) return {};
  return Reason{
      .text = fmt::format(
          "the parameters of '{}' are copied into a type twice as wide{}: {} so far, {} of them more than before",
          keeper, at(failed->where), with_unit(copies.bytes), with_unit(copies.bytes / 2)),
      .bytes = copies.bytes / 2,
      .fix = "weights_as_they_are"};
}

}  // namespace oomdiag
