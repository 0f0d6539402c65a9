#include <algorithm>
#include <cctype>

#include "cli/experiments/fix.h"
#include "profiler/whole_number.h"

// The batch size among the words of a command line. Names are those that training programs use: of argparse, click, fire, Hydra.

namespace oomdiag {
namespace {

std::string to_lower(std::string_view text) {
  std::string lower(text);
  std::ranges::transform(lower, lower.begin(), [](unsigned char letter) { return std::tolower(letter); });
  return lower;
}

/// A whole number of two or more: of one example there is no half.
std::optional<int64_t> read_batch(std::string_view text) {
  const std::optional<int64_t> number = parse_whole_number(text);
  return number && *number >= 2 ? number : std::nullopt;
}

}  // namespace

bool names_batch(std::string_view option) {
  const std::string name = to_lower(option.substr(std::min(option.find_first_not_of('-'), option.size())));
  const auto has = [&](std::string_view part) { return name.find(part) != name.npos; };
  if (name == "b" || name == "bs" || name.ends_with(".bs")) return true;
  return has("batch") && !has("batches") && !has("num") && !has("eval") && !has("val_") && !has("test") &&
         !has("accum");
}

void recognise_batch(Target& target) {
  std::vector<std::string>& words = target.program;
  const auto has_place = [](const std::string& word) { return word.find("{batch}") != word.npos; };
  if (target.batch || std::ranges::any_of(words, has_place)) return;
  for (size_t i = 1; i < words.size(); ++i) {
    const size_t equals = words[i].find('=');
    const bool inside = equals != std::string::npos;
    if (!inside && (words[i].front() != '-' || i + 1 == words.size())) continue;
    const std::string option = words[i].substr(0, equals);
    const std::optional<int64_t> batch =
        read_batch(inside ? std::string_view(words[i]).substr(equals + 1) : words[i + 1]);
    if (!batch || !names_batch(option)) continue;
    target.batch = batch;
    target.batch_words = option + (inside ? "={batch}" : " {batch}");
    (inside ? words[i] : words[i + 1]) = inside ? option + "={batch}" : "{batch}";
    return;
  }
}

}  // namespace oomdiag
