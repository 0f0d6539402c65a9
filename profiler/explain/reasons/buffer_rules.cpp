#include <fmt/format.h>

#include <algorithm>

#include "profiler/explain/facts/common_referrers.h"
#include "profiler/explain/facts/growth.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/explain/words/short_place.h"
#include "profiler/replay/history.h"

// Rows of kReasons about what gets larger with each step: a recurrent state with its graph, a key-value cache, results that are
// concatenated.

namespace oomdiag {

Found find_attached_state(const ReasonFacts& f) {
  for (const Growth& growth : f.growths) {
    const auto place =
        std::ranges::find_if(growth.places, [](const GrowingPlace& one) { return is_recurrent(one.where); });
    if (place == growth.places.end() || !is_large(f, growth.grown_bytes, kWorthNaming)) continue;
    if (growth.is_collected()) continue;  // the container keeps it, and not the state of the next step
    const std::string line = short_place(place->where);
    return Reason{
        .text = fmt::format("recurrent state is not detached: each step keeps the graph of all before it, {} per "
                            "step ({})",
                            with_unit(growth.bytes_per_step), line),
        .bytes = growth.grown_bytes,
        .fix = "detach_state",
        .how = {fmt::format("state = state.detach()  # behind {}; of an LSTM both: (h.detach(), c.detach())", line)}};
  }
  return {};
}

namespace {

/// Of what each step makes larger: results that nobody reads before the end, or a memory that the next step works on.
std::vector<std::string> lines_for_buffer(const std::string& variable) {
  std::vector<std::string> lines{std::string(find_fix("results_to_host")->lines)};
  const std::string name = as_written(variable_name(variable));
  if (!name.empty())
    lines.push_back(fmt::format("{0} = {0}[-limit:]  # if later steps read it: only the last ones", name));
  return lines;
}

/// Results of layers that get larger with each step: what they are given does.
Reason grows_with_its_data(const ReasonFacts& f, const Growth& growth) {
  const Growth* data = nullptr;
  for (const Growth& one : f.growths) {
    const bool is_given = one.kind == GrowthKind::growing_buffer && one.held.module.empty() && !one.referrer.empty();
    if (is_given && (data == nullptr || one.bytes_per_step > data->bytes_per_step)) data = &one;
  }
  const std::string what = data == nullptr ? "" : fmt::format(", as {} gets larger{}", data->referrer, at(data->held));
  const std::string name = data == nullptr ? "batch" : as_written(variable_name(data->referrer));
  return {.text = fmt::format("layers work on more with each step{}: {} more per step in all ({})", what,
                              with_unit(sum_per_step(f.growths)), short_place(growth.held)),
          .bytes = sum_grown(f.growths),
          .fix = "as_much_as_before",
          .how = {fmt::format("{0} = {0}[:limit]  # at most so many rows at once; or parts of it, one after the other",
                              name)}};
}

/// Whether it is small beside what a step requests that works on far more than those before: of a longer prompt, say.
bool is_of_larger_step(const ReasonFacts& f, int64_t grown_bytes) {
  return grown_bytes < requested_bytes(f) && find_larger_step(f).has_value();
}

/// The first of those that are worth mentioning for which `counts` holds; or null.
const Growth* find_buffer(const ReasonFacts& f, bool (*counts)(const Growth&)) {
  constexpr int64_t kWorthMentioning = 20;  // a part of what grows
  constexpr double kLeastPart = 0.01;       // of what is allocated: words of a sentence are no buffer
  const int64_t all = sum_per_step(f.growths);
  const auto is_such = [&](const Growth& growth) {
    if (growth.kind != GrowthKind::growing_buffer || growth.bytes_per_step * kWorthMentioning < all) return false;
    const bool is_worth = failure(f) == nullptr ||
                          (is_large(f, growth.grown_bytes, kLeastPart) && !is_of_larger_step(f, growth.grown_bytes));
    return is_worth && counts(growth);
  };
  const auto found = std::ranges::find_if(f.growths, is_such);
  return found == f.growths.end() ? nullptr : &*found;
}

}  // namespace

Found find_key_value_cache(const ReasonFacts& f) {
  const Growth* const cache = find_buffer(
      f, [](const Growth& growth) { return growth.held.op == "aten::cat" && is_of_attention(growth.held); });
  if (cache == nullptr) return {};
  return Reason{.text = fmt::format("the key-value cache grows with each token, {} per step ({})",
                                    with_unit(cache->bytes_per_step), short_place(cache->held)),
                .bytes = cache->grown_bytes,
                .fix = "smaller_cache"};
}

Found find_growing_buffer(const ReasonFacts& f) {
  const Growth* const buffer = find_buffer(f, [](const Growth&) { return true; });
  if (buffer == nullptr) return {};
  const bool is_of_layer = !buffer->held.module.empty() && !joins(buffer->held) && !buffer->is_collected();
  // What is a variable of forward() is no result that somebody keeps.
  const bool is_kept = !buffer->referrer.empty() && !is_variable_of_forward(buffer->referrer);
  if (is_of_layer && !is_kept) return grows_with_its_data(f, *buffer);
  return Reason{.text = fmt::format("results are concatenated on the GPU{}, {} more per step ({})",
                                    buffer->referrer.empty() ? "" : " in " + buffer->referrer,
                                    with_unit(buffer->bytes_per_step), short_place(buffer->held)),
                .bytes = buffer->grown_bytes,
                .fix = "results_to_host",
                .how = lines_for_buffer(buffer->referrer)};
}

}  // namespace oomdiag
