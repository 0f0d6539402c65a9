#include <algorithm>
#include <cctype>

#include "cli/experiments/fix.h"

// The batch size among the words of a command line. Names are those that training programs use: of argparse, click, fire, Hydra.

namespace oomdiag {
namespace {

std::string to_lower(std::string_view text) {
  std::string lower(text);
  std::ranges::transform(lower, lower.begin(), [](unsigned char letter) { return std::tolower(letter); });
  return lower;
}

}  // namespace

bool names_batch(std::string_view option) {
  const std::string name = to_lower(option.substr(std::min(option.find_first_not_of('-'), option.size())));
  const auto has = [&](std::string_view part) { return name.find(part) != name.npos; };
  if (name == "b" || name == "bs" || name.ends_with(".bs")) return true;
  return has("batch") && !has("batches") && !has("num") && !has("eval") && !has("val_") && !has("test") &&
         !has("accum");
}

}  // namespace oomdiag
