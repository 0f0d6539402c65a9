#include "cli/experiments/fit_lengths.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <sstream>

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

}  // namespace

Variable Lengths::variable() const {
  Variable variable{.name = kLength, .least = distinct.front(), .most = distinct.back()};
  variable.list = {distinct.front(), distinct[distinct.size() / 2], distinct.back()};
  variable.list.erase(std::unique(variable.list.begin(), variable.list.end()), variable.list.end());
  return variable;
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
    const auto border = compute_largest(function, batch, others, fitter.card_bytes());
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
  std::string text =
      fmt::format("  {} samples of {} to {}: ", lengths.samples, lengths.distinct.front(), lengths.distinct.back());
  text += any_order.value ? fmt::format("{} of the longest together are the worst batch, and fit\n", *any_order.value)
                          : std::string("one of the longest alone does not fit\n");
  if (!budget) return text + "  no budget of tokens is known, as memory is not known as a function of the length\n";
  return text +
         fmt::format("  batches of up to {} tokens, padding included, never fail; at length {} that is closest\n",
                     budget->tokens, budget->tightest.others.at(kLength));
}

}  // namespace oomdiag
