#include "cli/experiments/fit_lengths.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "cli/experiments/experiment.h"
#include "cli/experiments/fit.h"
#include "cli/experiments/fit_function.h"
#include "profiler/error.h"
#include "profiler/whole_number.h"

namespace oomdiag {
namespace {

constexpr size_t kMaxLengths = 100;  ///< whose border is computed; of more, evenly spread ones with both ends

std::vector<int64_t> spread_over(const std::vector<int64_t>& all) {
  if (all.size() <= kMaxLengths) return all;
  std::vector<int64_t> some;
  for (size_t i = 0; i < kMaxLengths; ++i) some.push_back(all[i * (all.size() - 1) / (kMaxLengths - 1)]);
  return some;
}

nlohmann::json batches_of_loaders(nlohmann::json settings) {
  return nlohmann::json::array({nlohmann::json::array({"loader_batches", std::move(settings)})});
}

/// Of the data set that is trained on, which is the one with most samples.
void take_lengths(const nlohmann::json& loader, Lengths& lengths) {
  if (loader.at("samples") < lengths.of_samples) return;
  lengths.of_samples = loader.at("samples");
  lengths.samples = loader.at("looked_at");
  lengths.distinct.clear();
  for (const auto& [length, place] : lengths.loaders.back()) lengths.distinct.push_back(length);
}

}  // namespace

Variable Lengths::variable() const {
  Variable variable{.name = kLength, .least = distinct.front(), .most = distinct.back()};
  variable.list = {distinct.front(), distinct[distinct.size() / 2], distinct.back()};
  variable.list.erase(std::unique(variable.list.begin(), variable.list.end()), variable.list.end());
  return variable;
}

nlohmann::json Lengths::batches_of(int64_t length) const {
  auto chosen = nlohmann::json::array();
  for (const auto& places : loaders) {
    const auto next = places.lower_bound(length);
    chosen.push_back(places.empty() ? -1 : next == places.end() ? places.rbegin()->second : next->second);
  }
  return batches_of_loaders({{"samples", chosen}});
}

Lengths look_at_loaders(FitRequest request, Experiments& experiments, const Values& values) {
  request.fixes_of = [](const Values&) { return batches_of_loaders({{"look", true}}); };
  Fitter fitter(request, experiments, [](std::size_t) {});
  Lengths lengths;
  const std::vector<FitRun> runs = fitter.learn({values});
  std::string why_not;
  for (const nlohmann::json& line : runs.front().experiment.reported) {
    why_not = line.value("not_applied", why_not);
    if (!line.contains("loader_lengths")) continue;
    const nlohmann::json& loader = line.at("loader_lengths");
    lengths.loaders.emplace_back();
    for (const auto& of_length : loader.at("lengths")) lengths.loaders.back()[of_length.at(0)] = of_length.at(2);
    take_lengths(loader, lengths);
  }
  if (lengths.distinct.size() > 1) return lengths;
  const std::string no_lengths = lengths.loaders.empty()
                                     ? "the program goes through no DataLoader that makes batches of samples"
                                     : "all samples of the program's DataLoader are of one size";
  throw Error(
      ErrorKind::input,
      why_not.empty() ? no_lengths : "no batch can be made of one sample of the program's DataLoader: " + why_not,
      "write the lengths into a file: --lengths lengths.txt, or search without --lengths");
}

Lengths read_lengths(const std::filesystem::path& file) {
  std::ifstream stream(file);
  if (!stream) throw Error(ErrorKind::input, fmt::format("cannot read '{}'", file.string()), "one length per line");
  std::stringstream whole;
  whole << stream.rdbuf();
  std::string text = whole.str();
  std::ranges::replace(text, ',', ' ');
  std::istringstream words(text);
  Lengths lengths;
  for (std::string word; words >> word; ++lengths.samples) {
    const int64_t length = parse_whole_number(word).value_or(0);
    if (length <= 0) {
      throw Error(ErrorKind::input, fmt::format("'{}' in '{}' is no length", word, file.string()),
                  "one positive number per sample");
    }
    lengths.distinct.push_back(length);
  }
  if (lengths.distinct.empty())
    throw Error(ErrorKind::input, fmt::format("'{}' is empty", file.string()), "one length per line");
  std::ranges::sort(lengths.distinct);
  lengths.distinct.erase(std::unique(lengths.distinct.begin(), lengths.distinct.end()), lengths.distinct.end());
  lengths.of_samples = lengths.samples;
  return lengths;
}

// A budget of T tokens makes batches of T / L samples of length L: it fails at L where that is above L's own border. So the first
// budget that fails anywhere is the least of L ∙ (border + 1).
std::optional<TokenBudget> find_token_budget(Fitter& fitter, const Variable& batch, const Lengths& lengths,
                                             MemoryFunction& function) {
  if (!function.is_known()) return std::nullopt;
  std::optional<TokenBudget> budget;
  Values tightest;
  for (const int64_t length : spread_over(lengths.distinct)) {
    const Values others{{kLength, length}};
    const auto border = compute_largest(function, batch, others, fitter.gpu_bytes());
    if (border && *border == batch.most) continue;  // the data set or the range ends first
    const int64_t tokens = length * (border.value_or(0) + 1) - 1;
    if (budget && budget->tokens <= tokens) continue;
    budget = TokenBudget{.tokens = tokens};
    tightest = others;
  }
  if (!budget) return std::nullopt;
  const auto proved = find_largest_by_function(fitter, batch, tightest, function);
  if (!proved) return std::nullopt;
  budget->tightest = *proved;
  budget->tokens = std::min(budget->tokens, tightest.at(kLength) * (proved->value.value_or(0) + 1) - 1);
  return budget;
}

std::string lengths_text(const Lengths& lengths, const LargestValue& any_order,
                         const std::optional<TokenBudget>& budget) {
  const std::string looked_at = lengths.samples < lengths.of_samples
                                    ? fmt::format("the first {} of {} samples", lengths.samples, lengths.of_samples)
                                    : fmt::format("{} samples", lengths.samples);
  std::string text = fmt::format("  {} of {} to {}: ", looked_at, lengths.distinct.front(), lengths.distinct.back());
  text += any_order.value ? fmt::format("the worst batch ({} of the longest samples) fits\n", *any_order.value)
                          : std::string("one of the longest alone does not fit\n");
  if (!budget) return text + "  no budget of tokens is known, as memory is not known as a function of the length\n";
  return text +
         fmt::format("  batches of up to {} tokens, padding included, never fail; at length {} that is closest\n",
                     budget->tokens, budget->tightest.others.at(kLength));
}

}  // namespace oomdiag
