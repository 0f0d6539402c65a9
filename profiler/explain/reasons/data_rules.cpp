#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>

#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/explain/words/shape.h"
#include "profiler/explain/words/short_place.h"
#include "profiler/one_of.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/history.h"
#include "profiler/trace/stack_call.h"

// Rows of kReasons about data: what of it lies on the GPU, how it is coded, and steps that have more of it than those before.

namespace oomdiag {
namespace {

/// Labels of 8 bytes of which zeros of 4 bytes have so many for each: masks that scatter_() fills.
bool is_masks_of(int64_t zeros_bytes, const LiveBlock& labels) {
  constexpr int64_t kFewClasses = 3, kManyClasses = 100'000;
  const bool is_label = labels.category == Category::input && (labels.shape.empty() || contains(labels.shape, "int64"));
  if (!is_label || labels.requested_bytes < 1024 || 2 * zeros_bytes % labels.requested_bytes != 0) return false;
  const int64_t classes = 2 * zeros_bytes / labels.requested_bytes;
  return classes >= kFewClasses && classes <= kManyClasses;
}

bool makes_masks(const ReasonFacts& facts, const Where& made, int64_t bytes) {
  if (is_one_of(made.op, {"aten::one_hot"})) return true;
  if (!is_one_of(made.op, {"aten::zeros", "aten::zeros_like", "aten::new_zeros", "aten::scatter"})) return false;
  // Masks of zeros are for a loss.
  if (!learns(facts) || (failure(facts) != nullptr && failure(facts)->modules_evaluate)) return false;
  return std::ranges::any_of(facts.device.state.blocks,
                             [&](const LiveBlock& block) { return is_masks_of(bytes, block); });
}

/// What belongs to a module is no data.
bool is_of_module(const ReasonFacts& facts, const LiveBlock& block) {
  return block.category == Category::buffer || !module_of(facts.referrers.find(block)).empty();
}

/// Many copies of one size that one line made, and of no other size worth mentioning: weights of a model that goes to the GPU by one
/// line are of several sizes. Nothing has used them yet, so that they are of no category.
template <class Holds>
Share find_equal_copies(const ReasonFacts& facts, const Holds& holds) {
  constexpr int64_t kMany = 16;
  std::map<std::string_view, std::map<int64_t, Share>> lines;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const bool is_unused = block.category == Category::unknown && !block.pending_free && !block.made.source.empty();
    if (is_unused && holds(block) && !is_of_module(facts, block))
      lines[block.made.source][block.requested_bytes].add(block);
  }
  Share most;
  for (const auto& [source, sizes] : lines) {
    const Share& largest = sizes.rbegin()->second;
    int64_t others = 0;
    for (const auto& [size, share] : sizes) others += share.bytes;
    if (largest.count >= kMany && largest.bytes * 10 >= others * 9 && largest.bytes > most.bytes) most = largest;
  }
  return most;
}

/// The largest result of each op of a layer: by these two steps are compared.
std::map<std::pair<std::string_view, std::string_view>, int64_t> list_results(const StepAllocations& step) {
  std::map<std::pair<std::string_view, std::string_view>, int64_t> largest;
  for (const StepAllocation& block : step.blocks) {
    const bool is_result = block.is_of_step() && block.phase != Phase::backward && block.phase != Phase::optimizer &&
                           block.category != Category::workspace && !block.made.module.empty();
    if (!is_result) continue;
    int64_t& bytes = largest[{block.made.module, block.made.op}];
    bytes = std::max(bytes, block.bytes);
  }
  return largest;
}

/// How many times as large most layers' results are as in the step before; 0 where too few are known.
double compare_with_step_before(const ReasonFacts& facts) {
  constexpr size_t kFewLayers = 3, kFewestLayers = 2;
  constexpr double kMany = 3;  // times as large: two layers show it
  constexpr int64_t kWorthLooking = 1 << 20;
  const auto before = list_results(facts.device.complete);
  std::map<double, int64_t> ratios;  // and bytes now: blocks of small results are rounded up
  int64_t all = 0;
  size_t count = 0;
  for (const auto& [layer, bytes] : list_results(facts.device.step_allocations)) {
    const auto same = before.find(layer);
    if (bytes < kWorthLooking || same == before.end()) continue;
    ratios[static_cast<double>(bytes) / static_cast<double>(same->second)] += bytes;
    all += bytes;
    ++count;
  }
  int64_t smaller = 0;
  for (const auto& [ratio, bytes] : ratios) {
    smaller += bytes;
    if (smaller * 2 >= all) return count >= (ratio >= kMany ? kFewestLayers : kFewLayers) ? ratio : 0;
  }
  return 0;
}

}  // namespace

Found find_one_hot(const ReasonFacts& facts) {
  const Share made = sum_blocks(facts, [&](const LiveBlock& block) {
    const bool is_labels = block.phase != Phase::setup || block.made.op == "aten::one_hot";
    return block.category != Category::optimizer_state && is_labels &&
           makes_masks(facts, block.made, block.requested_bytes);
  });
  const OutOfMemory* failed = failure(facts);
  const bool fails = failed != nullptr && failed->phase != Phase::optimizer &&
                     makes_masks(facts, failed->where, failed->requested_bytes);
  const int64_t bytes = made.bytes + (fails ? failed->requested_bytes : 0);
  const Where where = fails ? failed_in(facts) : made.made();
  if (!is_large(facts, bytes, where.op == "aten::one_hot" ? 0.2 : kLargePart)) return {};
  const std::string_view type = where.op == "aten::one_hot" ? " of 64-bit integers" : "";
  return Reason{
      .text = fmt::format("one-hot labels{}{}: {}", type, at(where), with_unit(bytes)),
      .bytes = bytes,
      .fix = "class_indices",
      .how = {"loss = F.cross_entropy(logits, labels)  # takes indices; or gather() what the mask would select"}};
}

// Sorted values, where each was (64 bits), and scratch for both.
Found find_sort_temporaries(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->phase == Phase::backward ||
      !fails_in(facts, {"aten::sort", "aten::argsort", "aten::msort", "aten::topk", "aten::quantile",
                        "aten::nanquantile", "aten::median", "aten::nanmedian", "aten::kthvalue", "aten::mode",
                        "aten::unique", "aten::_unique2", "aten::unique_dim", "aten::nonzero"}))
    return {};
  const Share made = sum_blocks(facts, [&](const LiveBlock& block) { return is_same_call(block.made, failed->where); });
  const int64_t bytes = made.bytes + failed->requested_bytes;
  if (!is_large(facts, bytes)) return {};
  return Reason{
      .text = fmt::format("{} of a whole tensor at once{} takes {}: sorted values, their places in 64 bits, and "
                          "scratch space",
                          failed->where.op, at(failed->where), with_unit(bytes)),
      .bytes = bytes,
      .fix = "sort_in_parts",
      .how = fails_in(facts, {"aten::quantile", "aten::nanquantile", "aten::median", "aten::nanmedian"})
                 ? std::vector<std::string>()
                 : std::vector<std::string>{
                       "for part in x.split(64): use(part.argsort())  # of rows one block after the other, each "
                       "reduced before the next; or x.cpu().argsort(): the host has room for it"}};
}

// nonzero() of the mask: for each true element, here of all, a number of 64 bits by dimension.
Found find_mask_indices(const ReasonFacts& facts) {
  constexpr int64_t kIndexBytes = 8, kMaxDimensions = 5;
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr ||
      !fails_in(facts, {"aten::index", "aten::index_put_", "aten::masked_select", "aten::_index_put_impl_"}) ||
      !is_one_of(failed->where.inner, {"aten::resize_", "aten::nonzero"}) || !is_large(facts, failed->requested_bytes))
    return {};
  const auto is_mask = [&](const LiveBlock& block) {
    const int64_t mask_bytes = block.requested_bytes;  // one for each element
    const int64_t dimensions = mask_bytes > 0 ? failed->requested_bytes / (kIndexBytes * mask_bytes) : 0;
    return !block.pending_free && dimensions > 0 && dimensions <= kMaxDimensions &&
           round_size(kIndexBytes * dimensions * mask_bytes, {}) == failed->requested_bytes;
  };
  if (std::ranges::none_of(facts.device.state.blocks, is_mask)) return {};
  return Reason{.text = fmt::format("a mask of booleans becomes indices of 64 bits{}, one for each dimension of each "
                                    "element that it selects: {}",
                                    at(failed->where), with_unit(failed->requested_bytes)),
                .bytes = failed->requested_bytes,
                .fix = "masked_fill"};
}

namespace {

/// The variable that has the tensor of the host that was to be copied, ", dict 'batch' in train (train.py:9)"; empty if there is none, or
/// several have one of that size.
std::string name_source(const ReasonFacts& facts) {
  std::string_view source;
  for (const Referrer& one : facts.device.host_tensors) {
    const bool may_be = is_of_as_many(one.bytes, requested_bytes(facts));
    if (may_be && !source.empty() && source != one.variable) return {};
    if (may_be) source = one.variable;
  }
  return source.empty() ? "" : fmt::format(", {}", source);
}

/// Of a copy to the GPU that failed beside `data`, which is there.
std::string name_copies(const ReasonFacts& facts, const OutOfMemory& failed, const Share& data) {
  const int64_t requested = failed.requested_bytes;
  const std::string line = at(failed.where);
  if (data.bytes * 20 < requested)
    return fmt::format("a tensor of {} is copied to the GPU as a whole{}{}", with_unit(requested), line,
                       name_source(facts));
  if (requested * 20 < data.bytes)
    return fmt::format("the data set goes to the GPU as a whole{}: {} tensors so far, {}", at(data.made()), data.count,
                       with_unit(data.bytes));
  return fmt::format("tensors are copied to the GPU as a whole: {} at once{}, beside {}{}", with_unit(requested), line,
                     with_unit(data.bytes), at(data.made()));
}

/// How many times as large as the largest tensor that the step before copied to the GPU; 0 where it copied none.
int64_t compare_with_copies_before(const ReasonFacts& facts) {
  int64_t largest = 0;
  for (const StepAllocation& block : facts.device.complete.blocks) {
    const bool is_copied = block.is_of_step() && is_copy(block.made.op) && block.made.module.empty();
    if (is_copied) largest = std::max(largest, block.bytes);
  }
  return largest > 0 ? requested_bytes(facts) / largest : 0;
}

}  // namespace

Found find_data_on_gpu(const ReasonFacts& facts) {
  constexpr int64_t kFarLarger = 4;
  constexpr int64_t kSeveralBatches = 4;
  const auto is_copied_before = [](const LiveBlock& block) {
    return is_copy(block.made.op) && block.phase == Phase::setup;
  };
  const auto is_data_of_program = [&](const LiveBlock& block) {
    if (block.category == Category::input) return true;
    const Referrer* const referrer = facts.referrers.find(block);  // of what nothing has used yet a variable tells
    return block.category == Category::unknown && referrer != nullptr && module_of(referrer).empty() &&
           block.made.module.empty();
  };
  Share data =
      sum_blocks(facts, [&](const LiveBlock& block) { return is_data_of_program(block) && is_copied_before(block); });
  if (const Share equal = find_equal_copies(facts, is_copied_before); equal.bytes > data.bytes) data = equal;
  const OutOfMemory* failed = failure(facts);
  const bool fails = failed != nullptr && (failed->phase == Phase::setup || failed->phase == Phase::other) &&
                     is_copy(failed->where.op) && failed->where.module.empty() &&
                     is_large(facts, failed->requested_bytes + data.bytes, 0.4);
  const bool is_one = data.largest != nullptr && is_large(facts, data.largest->bytes, 0.4);
  const bool are_several = data.count >= kSeveralBatches && is_large(facts, data.bytes, 0.4);
  if (!fails && !is_one && !are_several) return {};
  const Where where = data.largest != nullptr ? data.made() : failed_in(facts);
  const int64_t bytes = data.bytes + (fails ? failed->requested_bytes : 0);
  std::vector<std::string> lines{
      are_several && !is_one && !where.source.empty()
          ? fmt::format(
                "x = x.cuda(non_blocking=True)  # of each batch, as the loop takes it; and no move to the GPU at {}",
                short_place(where))
          : "for x in DataLoader(data, batch_size=64, pin_memory=True): x = x.cuda(non_blocking=True)"};
  if (fails) lines.emplace_back("for part in x.split(65536): f(part.cuda())  # or each part only when it is needed");
  if (fails)
    lines.emplace_back(
        "x = x.float()  # on the host first, if it is float64, as of NumPy; else smaller, as only a matrix's diagonal");
  const int64_t times = fails ? compare_with_copies_before(facts) : 0;
  if (times >= kFarLarger)
    lines.insert(lines.begin(),
                 "# examples of many lengths: the longest cut, or batches of as many elements each time");
  const std::string larger =
      times >= kFarLarger ? fmt::format(", {} times as large as any of the step before", times) : "";
  return Reason{.text = fails ? name_copies(facts, *failed, data) + larger
                              : fmt::format("the data set lies on the GPU{}: {}", at(where), with_unit(bytes)),
                .bytes = bytes,
                .fix = "data_on_host",
                .how = std::move(lines)};
}

// Of the last step of training, while an evaluation needs none; nor does the copy of the next batch.
Found find_kept_gradients(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || facts.device.attribution.backward_bytes == 0) return {};
  const bool is_between = failed->phase == Phase::other && failed->where.module.empty();
  if (builds_graph(facts).value_or(!is_between)) return {};
  const bool evaluates = failed->phase == Phase::forward || failed->phase == Phase::other;
  const Share gradients = sum_category(facts, Category::gradient);
  const double part = is_between ? 0.15 : 0.2;
  if (!evaluates || !is_large(facts, gradients.bytes, part) || !lets_request_through(facts, gradients.bytes)) return {};
  return Reason{.text = fmt::format("gradients of the last training step are still there, {}, {} ({})",
                                    with_unit(gradients.bytes),
                                    is_between ? "though no step is under way" : "in a part that builds no graph",
                                    short_place(failed->where)),
                .bytes = gradients.bytes,
                .kept_by = keeper_of_gradients(gradients),
                .fix = "gradients_to_none",
                .how = {"optimizer.zero_grad(set_to_none=True)  # right after optimizer.step(), before an evaluation"}};
}

namespace {

/// Of a module, called or not.
bool is_buffer(const ReasonFacts& facts, const LiveBlock& block) {
  const Referrer* const referrer = facts.referrers.find(block);
  return block.category == Category::buffer ||
         (referrer != nullptr && variable_name(referrer->variable).ends_with("_buffers"));
}

}  // namespace

Found find_large_buffers(const ReasonFacts& facts) {
  const Share buffers = sum_blocks(facts, [&](const LiveBlock& block) { return is_buffer(facts, block); });
  constexpr int64_t kMany = 8;  // that pile up
  if (buffers.largest == nullptr || !is_large(facts, buffers.bytes, buffers.count >= kMany ? 0.4 : 0.5)) return {};
  const LiveBlock& largest = *buffers.largest;
  if (const Referrer* const referrer = facts.referrers.find(largest); largest.name.empty() && referrer != nullptr) {
    return Reason{
        .text = fmt::format("{} buffers of modules are on the GPU{}, in {} and others like it: {}", buffers.count,
                            at(buffers.made()), referrer->variable, with_unit(buffers.bytes)),
        .bytes = buffers.bytes,
        .fix = "smaller_buffers",
        .how = {"module.to(\"cpu\")  # each one, when its turn is over, with its buffers; or they are made there"}};
  }
  return Reason{.text = fmt::format("the model's buffers take {}, the largest {} {}", with_unit(buffers.bytes),
                                    largest.name, largest.shape),
                .bytes = buffers.bytes,
                .fix = "smaller_buffers"};
}

Found find_equal_buffers(const ReasonFacts& facts) {
  constexpr int64_t kSeveral = 4;
  std::map<int64_t, Share> sizes;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (is_buffer(facts, block) && !block.pending_free) sizes[block.requested_bytes].add(block);
  }
  const auto most = std::ranges::max_element(sizes, {}, [](const auto& entry) { return entry.second.bytes; });
  if (most == sizes.end() || most->second.count < kSeveral || !is_large(facts, most->second.bytes, 0.4)) return {};
  const Share& buffers = most->second;
  const Referrer* const referrer = facts.referrers.find(*buffers.largest);
  const bool are_caches =
      contains(buffers.largest->name, "cache") || (referrer != nullptr && contains(referrer->variable, "cache"));
  if (are_caches) {
    return Reason{
        .text = fmt::format("{} caches of the model's layers are made for all positions at once{}: {} each{}, {}",
                            buffers.count, at(buffers.made()), with_unit(buffers.largest->bytes),
                            comma_shape(*buffers.largest), with_unit(buffers.bytes)),
        .bytes = buffers.bytes,
        .fix = "smaller_cache",
        .how = {"# caches of as many positions as are needed: the prompt and max_new_tokens, in place of the longest "
                "context"}};
  }
  return Reason{.text = fmt::format("{} buffers of the model's layers have {} each{}{}: {}", buffers.count,
                                    with_unit(buffers.largest->bytes), comma_shape(*buffers.largest),
                                    at(buffers.made()), with_unit(buffers.bytes)),
                .bytes = buffers.bytes - buffers.largest->bytes,
                .fix = "one_buffer"};
}

namespace {

/// Data that one line moved to the GPU in the step that failed, and in the one before.
struct DataOfSteps {
  const StepAllocation *now = nullptr, *before = nullptr;

  double times() const {
    return static_cast<double>(now->requested_bytes) / static_cast<double>(before->requested_bytes);
  }
};

std::map<std::string_view, const StepAllocation*> find_largest_data(const StepAllocations& step) {
  std::map<std::string_view, const StepAllocation*> largest;  // by line
  for (const StepAllocation& block : step.blocks) {
    const bool is_data = block.is_of_step() && block.made.module.empty() && is_copy(block.made.op) &&
                         block.phase != Phase::backward && block.phase != Phase::optimizer;
    if (!is_data) continue;
    const StepAllocation*& most = largest[block.made.source];
    if (most == nullptr || block.bytes > most->bytes) most = &block;
  }
  return largest;
}

/// The largest that are so many times as large as before; nothing where none are.
std::optional<DataOfSteps> compare_data(const ReasonFacts& facts, double fewest_times) {
  const auto before = find_largest_data(facts.device.complete);
  std::optional<DataOfSteps> most;
  for (const auto& [source, now] : find_largest_data(facts.device.step_allocations)) {
    const auto same = before.find(source);
    if (same == before.end() || same->second->requested_bytes <= 0) continue;
    const DataOfSteps data{.now = now, .before = same->second};
    if (data.times() >= fewest_times && (!most || now->bytes > most->now->bytes)) most = data;
  }
  return most;
}

/// "the data are [1280, 80, 6] float32 at fit.py:69, after [1024, 80, 6] float32 in the step before". Of the step before the shape may not be known.
std::string describe_data(const DataOfSteps& data) {
  const std::string_view now = data.now->shape, before = data.before->shape;
  const std::string what =
      fmt::format("the data are {}{}", now.empty() ? with_unit(data.now->requested_bytes) : now, at(data.now->made));
  if (parse_shape(now).size() != parse_shape(before).size() || before.empty())
    return fmt::format("{}, {:.1f} times as large as in the step before", what, data.times());
  return fmt::format("{}, after {} in the step before", what, before);
}

/// How to have no more of the dimension that is larger than before; empty where the shapes are not known, or rows are more.
std::string line_for_longest(const DataOfSteps& data) {
  const std::vector<int64_t> now = parse_shape(data.now->shape), before = parse_shape(data.before->shape);
  if (now.size() != before.size()) return {};
  const size_t at = static_cast<size_t>(std::ranges::mismatch(now, before).in1 - now.begin());
  if (at == 0 || at == now.size()) return {};
  std::string index;
  for (size_t i = 0; i < at; ++i) index += ":, ";
  return fmt::format(
      "x = x[{}:{}]  # the longest ones cut, or left out of the data: dimension {} has {} here, {} in the step before",
      index, before[at], at, now[at], before[at]);
}

/// Peaks of the last whole steps, the newest first, as far as each needs about as much more than the one before.
struct RisingPeaks {
  uint32_t last = 0;  ///< step
  std::vector<int64_t> bytes{};
};

/// Where `data_grow`, workspaces may hide some of the increases.
RisingPeaks find_rising_peaks(const ReasonFacts& facts, bool data_grow) {
  constexpr int64_t kUneven = 4;  // times the smallest increase
  constexpr int64_t kDip = 20;    // a part of a peak
  std::map<uint32_t, int64_t, std::greater<>> peaks;
  for (const PhasePeak& peak : facts.device.phases) {
    if (peak.step > 0 && peak.step < facts.device.state.step)
      peaks[peak.step] = std::max(peaks[peak.step], peak.allocated_bytes);
  }
  RisingPeaks rising;
  if (!peaks.empty()) rising.last = peaks.begin()->first;
  int64_t least = std::numeric_limits<int64_t>::max(), most = 0;
  for (const auto& [step, bytes] : peaks) {
    if (!rising.bytes.empty()) {
      const int64_t more = rising.bytes.back() - bytes;
      least = std::min(least, more);
      most = std::max(most, more);
      const bool follows = step + rising.bytes.size() == rising.last;
      const bool rises = data_grow ? more * kDip > -bytes : least > 0 && most <= kUneven * least;
      if (!follows || !rises) break;
    }
    rising.bytes.push_back(bytes);
  }
  return rising;
}

}  // namespace

Found find_growing_steps(const ReasonFacts& facts) {
  constexpr size_t kFewestSteps = 4;
  if (failure(facts) == nullptr || leading_growth(facts) != nullptr) return {};
  constexpr double kAnyLarger = 1.01;  // times
  const std::optional<DataOfSteps> data = compare_data(facts, kAnyLarger);
  const auto& [last, rising] = find_rising_peaks(facts, data.has_value());
  if (rising.size() < kFewestSteps || rising.front() * 3 < rising.back() * 4) return {};
  const auto steps = static_cast<uint32_t>(rising.size()) - 1;
  const uint32_t first = last - steps;
  const int64_t grown = rising.front() - rising.back();
  const auto left_after = [&](uint32_t step) {
    const auto end = std::ranges::find(facts.device.step_ends, step, &StepEnd::step);
    return end == facts.device.step_ends.end() ? int64_t{0} : end->allocated_bytes;
  };
  if ((left_after(last) - left_after(first)) * 2 > grown) return {};
  return Reason{
      .text = fmt::format("each step needs more than the one before, about {}, and leaves nothing behind: {} "
                          "in step {}, {} in step {} ({})",
                          with_unit(grown / steps), with_unit(rising.back()), first, with_unit(rising.front()), last,
                          data ? describe_data(*data) : short_place(failed_in(facts))),
      .bytes = grown,
      .fix = "as_much_as_before",
      .how = {
          "batch = data[start:end]  # of this step alone, if the batch or the sequence is not meant to "
          "grow; else at most so many rows of it",
          "samples.clear()  # of each list that a batch is made of, once a step has used it",
          "lengths.sort(reverse=True)  # of batches sorted by length the longest first: later ones reuse its memory"}};
}

namespace {

// A batch of another size, longer sequences, or a part of the program that does not split what the others split.
Found name_larger_step(const ReasonFacts& facts, double fewest_times, const std::optional<DataOfSteps>& data) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->phase == Phase::optimizer) return {};
  const double times = compare_with_step_before(facts);
  const uint32_t now = facts.device.step_allocations.step;
  const Share work = sum_blocks(facts, [&](const LiveBlock& block) {
    return block.step == now && !is_of_models(block.category) && !block.made.module.empty();
  });
  // What the program computes of results, once they are there, is no work of layers.
  const bool in_graph = builds_graph(facts).value_or(learns(facts));
  const int64_t asked = in_graph || !failed->where.module.empty() ? failed->requested_bytes : 0;
  if (times < fewest_times || !is_large(facts, work.bytes + asked, 0.4)) return {};
  // The model's result itself: all parts of it together are as large.
  const bool is_result =
      work.largest != nullptr && work.largest->category == Category::output && work.largest->bytes * 2 > work.bytes;
  const std::string result = is_result ? variable_of(facts.referrers.find(*work.largest)) : "";
  std::vector<std::string> lines{
      in_graph
          ? "for part in batch.split(size): (loss_of(part) * len(part) / len(batch)).backward()  # gradients add up"
      : result.empty()
          ? "y = torch.cat([model(part) for part in x.split(size)])  # of a longer sequence, split(size, dim=-1): each "
            "part as large as in the steps before"
          : fmt::format("for part in x.split(size): use(model(part))  # what is computed of {}, part after part: all "
                        "parts of it together are as large",
                        variable_name(result)),
      "# sequences or images of many sizes: a batch of as many tokens or pixels each time, or the largest ones "
      "cut or scaled down"};
  if (const std::string longest = data ? line_for_longest(*data) : std::string(); !longest.empty())
    lines.insert(lines.begin(), longest);
  const bool was_in_step_before = std::ranges::any_of(facts.device.complete.blocks, [&](const StepAllocation& block) {
    return block.is_of_step() && block.made.source == failed->where.source;
  });
  const std::vector<PaddedData>& padded = facts.device.padded;
  if (!padded.empty()) {
    const std::vector<std::string> shorter = lines_for_longest_sequences(padded.front());
    lines.insert(lines.begin(), shorter.begin(), shorter.end());
    lines.pop_back();  // says the same of data of any kind
  }
  const bool has_other = has_other_caller(*failed), is_of_training = was_in_step_before && !has_other;
  if (in_graph && !is_of_training)
    lines.insert(lines.begin(), "with torch.no_grad():  # if nothing is learned from this pass: samples, a validation");
  return Reason{.text = fmt::format(
                    "this step works on more at once: {}results of its layers are {:.{}f} times as large as in the "
                    "step before, {} so far ({}{}){}",
                    data ? describe_data(*data) + ", and " : "", times, times < 10 ? 1 : 0,
                    with_unit(work.bytes + asked), short_place(failed->where),
                    has_other ? ", called by " + find_caller_of_model(parse_stack(failed->stack), failed->where) : "",
                    padded.empty() ? "" : "; " + name_padding(padded.front())),
                .bytes = static_cast<int64_t>(static_cast<double>(work.bytes) * (1 - 1 / times)),
                .fix = "as_much_as_before",
                .how = std::move(lines)};
}

}  // namespace

Found find_larger_step(const ReasonFacts& facts) {
  constexpr double kTimes = 1.5;
  return name_larger_step(facts, kTimes, compare_data(facts, kTimes));
}

Found find_larger_data(const ReasonFacts& facts) {
  constexpr double kTimes = 6, kTimesOfData = 2;
  const std::optional<DataOfSteps> data = compare_data(facts, kTimesOfData);
  return data ? name_larger_step(facts, kTimes, data) : Found{};
}

}  // namespace oomdiag
