#include <fmt/format.h>
#include <fmt/ranges.h>

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
#include "profiler/replay/history.h"
#include "profiler/trace/stack_call.h"

// Rows of kReasons about data: what of it lies on the GPU, how it is coded, and how much of it goes through a model at once.

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

bool convolves(const ReasonFacts& facts) {
  return std::ranges::any_of(facts.device.state.blocks, [](const LiveBlock& block) {
    return block.category == Category::parameter && parse_shape(block.shape).size() >= 4;
  });
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
      "for x in DataLoader(data, batch_size=64, pin_memory=True): x = x.cuda(non_blocking=True)"};
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

/// Peaks of the last whole steps, the newest first, as far as each needs about as much more than the one before.
struct RisingPeaks {
  uint32_t last = 0;  ///< step
  std::vector<int64_t> bytes{};
};

RisingPeaks find_rising_peaks(const ReasonFacts& facts) {
  constexpr int64_t kUneven = 4;  // times the smallest increase
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
      if (!follows || least <= 0 || most > kUneven * least) break;
    }
    rising.bytes.push_back(bytes);
  }
  return rising;
}

}  // namespace

Found find_growing_steps(const ReasonFacts& facts) {
  constexpr size_t kFewestSteps = 4;
  if (failure(facts) == nullptr || leading_growth(facts) != nullptr) return {};
  const auto& [last, rising] = find_rising_peaks(facts);
  if (rising.size() < kFewestSteps || rising.front() * 3 < rising.back() * 4) return {};
  const auto steps = static_cast<uint32_t>(rising.size()) - 1;
  const uint32_t first = last - steps;
  const int64_t grown = rising.front() - rising.back();
  const auto left_after = [&](uint32_t step) {
    const auto end = std::ranges::find(facts.device.step_ends, step, &StepEnd::step);
    return end == facts.device.step_ends.end() ? int64_t{0} : end->allocated_bytes;
  };
  if ((left_after(last) - left_after(first)) * 2 > grown) return {};
  constexpr double kAnyLarger = 1.01;  // times
  const std::optional<DataOfSteps> data = compare_data(facts, kAnyLarger);
  return Reason{
      .text = fmt::format("each step needs more than the one before, about {}, and leaves nothing behind: {} "
                          "in step {}, {} in step {} ({})",
                          with_unit(grown / steps), with_unit(rising.back()), first, with_unit(rising.front()), last,
                          data ? describe_data(*data) : short_place(failed_in(facts))),
      .bytes = grown,
      .fix = "as_much_as_before",
      .how = {"batch = data[start:end]  # of this step alone, if the batch or the sequence is not meant to "
              "grow; else at most so many rows of it"}};
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
  if (times < fewest_times || !is_large(facts, work.bytes + failed->requested_bytes, 0.4)) return {};
  const bool in_graph = builds_graph(facts).value_or(learns(facts));
  std::vector<std::string> lines{
      in_graph
          ? "for part in batch.split(size): (loss_of(part) * len(part) / len(batch)).backward()  # gradients add up"
          : "y = torch.cat([model(part) for part in x.split(size)])  # of a longer sequence, split(size, dim=-1): each "
            "part as large as in the steps before",
      "# sequences or images of many sizes: a batch of as many tokens or pixels each time, or the largest ones "
      "cut or scaled down"};
  const bool was_in_step_before = std::ranges::any_of(facts.device.complete.blocks, [&](const StepAllocation& block) {
    return block.is_of_step() && block.made.source == failed->where.source;
  });
  const bool has_other = has_other_caller(*failed), is_of_training = was_in_step_before && !has_other;
  if (in_graph)
    lines.insert(is_of_training ? lines.end() : lines.begin(),
                 "with torch.no_grad():  # if nothing is learned from this pass: samples, a validation");
  return Reason{.text = fmt::format(
                    "this step works on more at once: {}results of its layers are {:.{}f} times as large as in the "
                    "step before, {} so far ({}{})",
                    data ? describe_data(*data) + ", and " : "", times, times < 10 ? 1 : 0,
                    with_unit(work.bytes + failed->requested_bytes), short_place(failed->where),
                    has_other ? ", called by " + find_caller_of_model(parse_stack(failed->stack), failed->where) : ""),
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

// Training computes in half precision, and what comes after it does not.
Found find_not_under_autocast(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->where.module.empty() || builds_graph(facts).value_or(true)) return {};
  const auto is_cast = [](const StepAllocation& block) { return block.is_of_step() && !block.made.autocast.empty(); };
  const bool has_cast = std::ranges::any_of(facts.device.complete.blocks, is_cast);
  const bool casts =
      !failed->where.autocast.empty() || std::ranges::any_of(facts.device.step_allocations.blocks, is_cast);
  const Share work = sum_blocks(facts, [](const LiveBlock& block) {
    return block.category == Category::output || block.category == Category::temporary;
  });
  const int64_t bytes = work.bytes + failed->requested_bytes;
  if (!has_cast || casts || !is_large(facts, bytes)) return {};
  return Reason{.text = fmt::format(
                    "training runs under autocast, and this part does not: {} in full precision at layer '{}' ({})",
                    with_unit(bytes), failed->where.module, short_place(failed->where)),
                .bytes = bytes / 2,
                .fix = "autocast_here_too",
                .how = {"with torch.no_grad(), torch.autocast(\"cuda\", torch.float16):  # around the evaluation, as "
                        "around training"}};
}

namespace {

/// Of those whose shape is known.
Share find_largest_shaped(const ReasonFacts& facts) {
  return sum_blocks(facts, [](const LiveBlock& block) { return is_data(block) && !block.shape.empty(); });
}

/// The shape of the largest tensor, "[1, 24, 1536000]", if it is of one sample, whose dimensions after the channels are all that is large;
/// else empty.
std::string find_single_sample(const ReasonFacts& facts) {
  const Share largest = find_largest_shaped(facts);
  if (largest.largest == nullptr || !is_large(facts, largest.largest->bytes, 0.1)) return {};
  const std::string shape(largest.largest->shape.substr(0, largest.largest->shape.find(']') + 1));
  const std::vector<int64_t> sizes = parse_shape(shape);
  return sizes.size() == 3 && sizes.front() == 1 && sizes.back() > 8 * sizes[1] ? shape : "";
}

/// Whether the largest tensor is a table of many rows, as of states, points or pairs.
bool has_many_rows(const ReasonFacts& facts) {
  constexpr int64_t kMany = 4096;
  const Share largest = find_largest_shaped(facts);
  const std::vector<int64_t> sizes =
      largest.largest == nullptr ? std::vector<int64_t>() : parse_shape(largest.largest->shape);
  return sizes.size() == 2 && sizes.front() >= kMany;
}

}  // namespace

// A program that never trains, or the evaluation of one that does, where a layer's outputs are as large as all else.
Found find_large_batch(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->where.module.empty() || contains(failed->stack, "utils/checkpoint.py")) return {};
  const bool has_trained = facts.device.attribution.backward_bytes > 0 || trains(facts);
  const std::optional<bool> graph = fails_in_graph(facts);
  const bool only_infers = failed->modules_evaluate && !has_trained && !wants_gradient_of_data(facts);
  if (graph.value_or(has_trained) && !only_infers) return {};
  const Share saved = sum_category(facts, Category::activation);
  const Share work = sum_blocks(facts, [](const LiveBlock& block) {
    return block.category == Category::output || block.category == Category::temporary ||
           block.category == Category::workspace;
  });
  if (is_large(facts, saved.bytes, 0.1) || !is_large(facts, work.bytes + failed->requested_bytes, 0.5)) return {};
  const std::string one = find_single_sample(facts);
  constexpr int64_t kParts = 8;                     // of a batch whose size is known
  constexpr int64_t kFewImages = 4, kFewRows = 16;  // of another one
  const int64_t size_of_part = facts.batch > 1    ? std::max<int64_t>(1, facts.batch / kParts)
                               : convolves(facts) ? kFewImages
                                                  : kFewRows;
  std::vector<std::string> lines{
      has_many_rows(facts)
          ? std::string("y = torch.cat([model(part) for part in x.split(1024)])  # or reduce each part at once")
          : fmt::format("y = torch.cat([model(part) for part in x.split({})])", size_of_part)};
  if (!one.empty())
    lines = {
        "y = torch.cat([model(part) for part in x.split(65536, -1)], -1)  # windows, or tiles of an image; they "
        "overlap "
        "where layers see beyond their edges"};
  else if (convolves(facts))
    lines.emplace_back(
        "x = F.interpolate(x, scale_factor=0.5)  # where one image is too large; or tiles that overlap: x[..., :512]");
  const std::string what = !one.empty() ? "length of one sample" : convolves(facts) ? "batch or image" : "batch";
  return Reason{
      .text = fmt::format("the whole {}{} goes through the model at once{}: {} at layer '{}' ({})", what,
                          !one.empty()      ? ", " + one + ","
                          : facts.batch > 1 ? fmt::format(", {} at a time,", facts.batch)
                                            : "",
                          graph == false ? ", without gradients" : "", with_unit(work.bytes + failed->requested_bytes),
                          failed->where.module, short_place(failed->where)),
      .bytes = (work.bytes + failed->requested_bytes) / 2,
      .fix = "split_batch",
      .how = std::move(lines)};
}

namespace {

/// [batch, channels, height, width], or with a depth before the height: images or volumes, and no result of a layer.
bool is_of_images(const std::vector<int64_t>& shape) {
  constexpr int64_t kMostChannels = 4;
  const bool has_values = std::ranges::all_of(shape, [](int64_t size) { return size > 0; });
  return (shape.size() == 4 || shape.size() == 5) && has_values && shape[1] <= kMostChannels;
}

bool is_of_large_images(const std::vector<int64_t>& shape) {
  constexpr int64_t kManyPixels = 1'000'000;
  return shape.size() == 4 && is_of_images(shape) && shape[2] * shape[3] >= kManyPixels;
}

/// The largest images that the step works on, if their shape is such a one.
const LiveBlock* find_images(const ReasonFacts& facts, bool (*is_such)(const std::vector<int64_t>& shape)) {
  return sum_blocks(facts,
                    [&](const LiveBlock& block) {
                      return is_data(block) && block.made.module.empty() && is_such(parse_shape(block.shape));
                    })
      .largest;
}

}  // namespace

Found find_large_images(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->where.module.empty() || !convolves(facts)) return {};
  if (!builds_graph(facts).value_or(false)) return {};  // parts of them will do
  const LiveBlock* const images = find_images(facts, is_of_large_images);
  const Share work =
      sum_blocks(facts, [](const LiveBlock& block) { return is_data(block) && !block.made.module.empty(); });
  const int64_t bytes = work.bytes + failed->requested_bytes;
  if (images == nullptr || !is_large(facts, bytes, 0.5)) return {};
  const std::vector<int64_t> shape = parse_shape(images->shape);
  const Referrer* const referrer = facts.referrers.find(*images);
  return Reason{
      .text = fmt::format("images of {} × {} pixels go through the model as they are{}{}: {} at layer '{}' ({})",
                          shape[2], shape[3], comma_shape(*images),
                          referrer == nullptr ? "" : fmt::format(" in {}", referrer->variable), with_unit(bytes),
                          failed->where.module, short_place(failed->where)),
      .bytes = bytes / 4 * 3,
      .fix = "smaller_images"};
}

namespace {

/// How many channels a layer's result has at each pixel of the images; 0 where it has none, or fewer pixels. Its shape is known of what a
/// node has saved, and of others by their size.
int64_t count_channels(const LiveBlock& block, const LiveBlock& images) {
  const std::vector<int64_t> sizes = parse_shape(images.shape), shape = parse_shape(block.shape);
  if (!shape.empty()) {
    const bool has_all = shape.size() == sizes.size() && shape[0] == sizes[0] &&
                         std::equal(shape.begin() + 2, shape.end(), sizes.begin() + 2);
    return has_all ? shape[1] : 0;
  }
  const int64_t of_one_channel = images.requested_bytes / sizes[1];
  const bool is_exact = of_one_channel > 0 && block.requested_bytes % of_one_channel == 0;
  const bool may_be_images = any_op(block.made, {"aten::conv2d", "aten::conv3d", "aten::batch_norm"});
  return is_exact && may_be_images ? block.requested_bytes / of_one_channel : 0;
}

}  // namespace

// The first layers of a network that was made for small images, or of one that keeps all pixels up to its end.
Found find_full_resolution(const ReasonFacts& facts) {
  constexpr int64_t kManyChannels = 16;
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || !convolves(facts) || !builds_graph(facts).value_or(true)) return {};
  const LiveBlock* const images = find_images(facts, is_of_images);
  if (images == nullptr) return {};
  const Share results = sum_blocks(facts, [&](const LiveBlock& block) {
    return is_data(block) && !block.made.module.empty() && count_channels(block, *images) >= kManyChannels;
  });
  // Where many layers have all pixels the network is meant to: a U-Net, or one that works on what an encoder made of images. Where each
  // image takes little, it is the batch.
  constexpr double kWorthOfOne = 0.15, kWorthOfImage = 0.01;
  if (results.largest == nullptr || !is_large(facts, results.largest->bytes, kWorthOfOne)) return {};
  if (!is_large(facts, results.largest->bytes / parse_shape(images->shape)[0], kWorthOfImage)) return {};
  const bool asks = failed->requested_bytes == results.largest->requested_bytes;
  const int64_t bytes = results.bytes + (asks ? failed->requested_bytes : 0);
  if (!is_large(facts, bytes, 0.5)) return {};
  return Reason{
      .text =
          fmt::format("layers work at all pixels of the images{}: what has their size takes {}, as the result of '{}' "
                      "with {} channels ({})",
                      comma_shape(*images), with_unit(bytes), results.largest->made.module,
                      count_channels(*results.largest, *images), short_place(results.largest->made)),
      .bytes = bytes / 4 * 3,
      .fix = "smaller_images",
      .how = {"nn.Conv2d(3, channels, 7, stride=2, padding=3)  # the first layer, or a pooling behind it: a "
              "quarter from there on",
              "images = F.interpolate(images, scale_factor=0.5)  # or as they are loaded: transforms.Resize(…)"}};
}

namespace {

/// What a layer works on at once: the sizes of its result but for the channels, which are second in images and volumes, else last.
std::vector<int64_t> rows_of(const LiveBlock& block) {
  std::vector<int64_t> shape = parse_shape(block.shape);
  if (shape.size() < 2) return {};
  const bool has_pixels = contains_one_of(block.made.op, {"conv", "batch_norm", "pool", "upsample"});
  shape.erase(has_pixels && shape.size() >= 3 ? shape.begin() + 1 : shape.end() - 1);
  return shape;
}

/// Of how many things a layer works on all pairs: two of the sizes that are equal, or one less, and not width and height. 0: it does not.
int64_t count_paired(const std::vector<int64_t>& sizes) {
  constexpr int64_t kMany = 64, kMore = 256;  // a batch may be as large as its sequences are long
  if (sizes.size() != 2 || sizes[0] < kMany) return 0;
  const bool are_all = sizes[0] == sizes[1] + 1 || (sizes[0] == sizes[1] && sizes[0] >= kMore);
  return are_all ? sizes[0] : 0;
}

}  // namespace

// What is left to say of a step of training: how much it works on at once, and what each row takes.
Found find_many_rows(const ReasonFacts& facts) {
  constexpr double kWorth = 0.25;  // of the memory: most layers have other sizes
  constexpr int64_t kManyRows = 64;
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->phase == Phase::optimizer || !builds_graph(facts).value_or(false)) return {};
  const auto is_saved = [&](const LiveBlock& block) {
    return block.category == Category::activation && block.step == facts.device.state.step &&
           !block.made.module.empty();
  };
  const Share saved = sum_blocks(facts, is_saved);
  if (!is_large(facts, saved.bytes, 0.5)) return {};
  std::map<std::vector<int64_t>, Share> alike;
  for (const LiveBlock& block : facts.device.state.blocks) {
    std::vector<int64_t> rows = is_saved(block) ? rows_of(block) : std::vector<int64_t>();
    if (!rows.empty()) alike[std::move(rows)].add(block);
  }
  const auto most = std::ranges::max_element(alike, {}, [](const auto& entry) { return entry.second.bytes; });
  if (most == alike.end() || !is_large(facts, most->second.bytes, kWorth)) return {};
  const auto& [sizes, work] = *most;
  int64_t rows = 1;
  for (const int64_t size : sizes) {
    if (size <= 0 || rows > saved.bytes / size) return {};  // no shape of what is there
    rows *= size;
  }
  if (rows < kManyRows) return {};
  const int64_t paired = count_paired(sizes);
  // So far: it may run backward without one.
  const bool has_backward = expects_backward(facts) || wants_gradient_of_data(facts);
  std::vector<std::string> how;
  if (paired > 0)
    how = {"near = torch.cdist(pos, pos) < cutoff  # pairs within a cutoff alone, as a list of indices",
           "# or the pairs of some rows after the other"};
  if (!has_backward) how.emplace_back("with torch.no_grad():  # around it, if nothing runs backward");
  const bool of_data_alone = has_backward && !expects_backward(facts);
  if (of_data_alone) how.emplace_back(kGradientsOfParts);
  return Reason{.text = fmt::format(
                    "one forward pass works on {} {}{} at once, as '{}' does{}, and keeps {} for "
                    "backward{}: {} for each{}",
                    fmt::join(sizes, " × "), sizes.size() >= 3 ? "places" : "rows",
                    paired > 0 ? fmt::format(", all pairs of {},", paired) : "", work.made().module,
                    comma_shape(*work.largest), with_unit(saved.bytes),
                    runs_checkpoints(facts) ? "" : ", as nothing is checkpointed", with_unit(saved.bytes / rows),
                    has_backward ? "" : "; no optimizer is there, and without backward, torch.no_grad() keeps none"),
                .bytes = saved.bytes / (has_backward ? 2 : 1),
                .fix = !has_backward                                           ? "no_grad_in_evaluation"
                       : of_data_alone                                         ? "split_batch"
                       : (sizes.size() == 1 && facts.batch <= 1) || paired > 0 ? "fewer_rows"
                                                                               : "",
                .how = std::move(how)};
}

Found find_full_matrices(const ReasonFacts& f) {
  const OutOfMemory& failure = *f.device.failure;
  if (failure.where.op != "aten::linalg_svd" || !is_large(f, failure.requested_bytes, kWorthNaming)) return {};
  const Share as_large = sum_blocks(f, [&](const LiveBlock& block) {
    return block.made.op != failure.where.op && block.requested_bytes == failure.requested_bytes;
  });
  if (as_large.count > 0) return {};  // what is decomposed is square itself
  const auto side = static_cast<int64_t>(std::sqrt(static_cast<double>(failure.requested_bytes) / 4));
  return Reason{.text = fmt::format("full_matrices=True, SVD's default, makes a square matrix of about {} × {} ({})",
                                    side, side, short_place(failure.where)),
                .bytes = failure.requested_bytes,
                .fix = "reduced_svd"};
}

// Shampoo and the like: a matrix of n × n for a weight of n rows, and its powers.
Found find_preconditioners(const ReasonFacts& f) {
  constexpr int64_t kLong = 1024, kTimesParameters = 4;
  const Share states = sum_category(f, Category::optimizer_state), parameters = sum_category(f, Category::parameter);
  const Share square = sum_blocks(f, [&](const LiveBlock& block) {
    const std::vector<int64_t> shape = parse_shape(block.shape);
    return block.category == Category::optimizer_state && shape.size() == 2 && shape[0] == shape[1] &&
           shape[0] >= kLong;
  });
  if (square.largest == nullptr || !is_large(f, square.bytes, 0.4)) return {};
  if (square.bytes < kTimesParameters * parameters.bytes) return {};
  const int64_t rows = parse_shape(square.largest->shape)[0];
  return Reason{
      .text = fmt::format("the optimizer keeps square matrices, of a weight with {} rows one of {} × {}{}: {} of "
                          "state for {} of parameters",
                          rows, rows, rows, at(square.made()), with_unit(states.bytes), with_unit(parameters.bytes)),
      .bytes = square.bytes,
      .fix = "no_preconditioner"};
}

Found find_float64(const ReasonFacts& f) {
  int64_t bytes = 0;
  for (const LiveBlock& block : f.device.state.blocks) bytes += block.shape.ends_with(" float64") ? block.bytes : 0;
  if (!is_large(f, bytes, 0.5)) return {};
  return Reason{.text = fmt::format("float64: {} are of double precision, twice as much as float32", with_unit(bytes)),
                .bytes = bytes,
                .fix = "float32"};
}

}  // namespace oomdiag
