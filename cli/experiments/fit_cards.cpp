#include "cli/experiments/fit_cards.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/experiments/fit_function.h"
#include "cli/experiments/fit_text.h"
#include "cli/terminal/json_text.h"
#include "cli/terminal/sizes.h"
#include "profiler/report/table.h"
#include "profiler/report/whole_run.h"

// What a program allocates hangs little on the card: libraries choose other workspaces for another architecture, and cuBLAS a larger
// one on Hopper. What the card has free differs most, and the allocator's algorithm says what that does. Runs prove the smallest.

namespace oomdiag {
namespace {

void compute(CardTable& table, const FitRequest& request, const Experiment& large) {
  const MemoryFunction function = MemoryFunction::of_one_run(large);
  table.unknown = function.unknown();
  if (!function.is_known()) return;
  const CardEntry& learned = request.device.virtual_host()->cards.front();
  for (CardFit& one : table.cards) {
    const int64_t context =
        one.card.context_bytes - learned.context_bytes;  // more of it than the first run's card took
    const ShapeEstimate estimate = function.estimate({}, one.card.total_bytes - context);
    one.fits = estimate.fits;
    one.is_exact = one.card.capability == learned.capability;
    one.allocated_bytes = estimate.peak_allocated_bytes;
    one.reserved_bytes = estimate.peak_reserved_bytes;
  }
}

void measure(CardFit& one, const FitRequest& request, Experiments& experiments,
             const std::function<void(std::size_t)>& tell, std::vector<FitRun>& runs) {
  FitRequest on_card = request;
  on_card.device.device = VirtualHost{.cards = {one.card}};
  Fitter fitter(on_card, experiments, tell);
  const Experiment run = fitter.run({{{}, one.card.total_bytes}}).front().experiment;
  runs.insert(runs.end(), fitter.runs().begin(), fitter.runs().end());
  one.fits = run.passed();
  one.is_measured = one.is_exact = true;
  one.allocated_bytes = run.allocated_bytes;
  one.reserved_bytes = run.reserved_bytes;
  one.place = run.place;
}

/// The next card that a run must show: the first that fits, and the one before it.
CardFit* find_unproved(CardTable& table) {
  const auto first = std::ranges::find_if(table.cards, &CardFit::fits);
  if (first == table.cards.end()) return table.cards.back().is_measured ? nullptr : &table.cards.back();
  if (!first->is_measured) return &*first;
  if (first == table.cards.begin() || (first - 1)->is_measured) return nullptr;
  return &*(first - 1);
}

std::string proof_of(const CardFit& one) {
  if (one.is_measured) return one.fits ? "run" : "run: out of memory in " + one.place;
  return one.is_exact ? "computed" : "computed: an estimate for another architecture";
}

}  // namespace

const CardFit* CardTable::smallest() const {
  const auto first = std::ranges::find_if(cards, &CardFit::fits);
  return first == cards.end() ? nullptr : &*first;
}

CardTable find_cards(const FitRequest& request, std::span<const CardEntry> cards, Experiments& experiments,
                     const std::function<void(std::size_t)>& tell, std::vector<FitRun>& runs) {
  CardTable table{.learned_on = request.device.virtual_host()->cards.front().id};
  for (const CardEntry& card : cards) table.cards.push_back({.card = card});
  std::ranges::stable_sort(table.cards, {}, [](const CardFit& one) { return one.card.total_bytes; });
  Fitter fitter(request, experiments, tell);
  const Experiment large = fitter.learn({{}}).front().experiment;
  runs = fitter.runs();
  if (!large.passed()) {
    table.unknown = "it runs out of memory on any card, in " + large.place;
  } else if (is_share_of_card(large.allocated_bytes, large.total_bytes)) {
    table.unknown = "it takes a share of whatever card it runs on";
  } else {
    compute(table, request, large);
  }
  if (!table.unknown.empty()) return table;
  while (CardFit* const next = find_unproved(table)) measure(*next, request, experiments, tell, runs);
  return table;
}

std::string cards_text(const CardTable& table, const std::vector<FitRun>& runs) {
  if (!table.unknown.empty()) return fmt::format("oomdiag: no card can be computed: {}\n", table.unknown);
  const CardFit* const smallest = table.smallest();
  if (smallest == nullptr) {
    return fmt::format("oomdiag: fits on none of these {} cards\n\n  {}\n", table.cards.size(), count_runs(runs));
  }
  std::string text = fmt::format("oomdiag: the smallest card that it fits on is {}, {} GiB\n\n", smallest->card.id,
                                 to_gib(smallest->card.total_bytes));
  text += "  GiB                    memory  allocated  reserved  fits\n";
  for (const CardFit& one : table.cards) {
    if (!one.fits && !one.is_measured) continue;
    text +=
        fmt::format("  {} {:>9}  {:>9} {:>9}  {}   {}\n", padded(one.card.id, 18), to_gib(one.card.total_bytes),
                    to_gib(one.allocated_bytes), to_gib(one.reserved_bytes), one.fits ? "yes" : "no ", proof_of(one));
  }
  const auto below =
      std::ranges::count_if(table.cards, [](const CardFit& one) { return !one.fits && !one.is_measured; });
  if (below > 0) text += fmt::format("  {} more do not fit it (computed)\n", below);
  return text + fmt::format("\n  what it allocates was learned on {}; {}\n", table.learned_on, count_runs(runs));
}

std::string cards_json(const CardTable& table, const std::vector<FitRun>& runs) {
  using Json = nlohmann::ordered_json;
  const CardFit* const smallest = table.smallest();
  Json json = {{"schema", "oomdiag-fit/1"},
               {"smallest_device", smallest == nullptr ? Json(nullptr) : Json(smallest->card.id)}};
  json["learned_on"] = table.learned_on;
  json["unknown"] = table.unknown.empty() ? Json(nullptr) : Json(table.unknown);
  json["devices"] = Json::array();
  for (const CardFit& one : table.cards) {
    json["devices"].push_back({{"device", one.card.id},
                               {"memory_bytes", one.card.total_bytes},
                               {"fits", table.unknown.empty() ? Json(one.fits) : Json(nullptr)},
                               {"measured", one.is_measured},
                               {"exact", one.is_exact},
                               {"peak_allocated_bytes", one.allocated_bytes},
                               {"peak_reserved_bytes", one.reserved_bytes}});
  }
  json["runs"] = runs.size();
  return to_text(json) + "\n";
}

}  // namespace oomdiag
