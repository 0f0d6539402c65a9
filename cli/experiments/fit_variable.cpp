#include <fmt/format.h>

#include <algorithm>

#include "cli/experiments/border_search.h"
#include "cli/experiments/fit.h"
#include "profiler/error.h"
#include "profiler/whole_number.h"

namespace oomdiag {
namespace {

constexpr int64_t kMax = int64_t{1} << 40;

/// A positive number, or 0.
int64_t read_number(std::string_view text) {
  const int64_t value = parse_whole_number(text).value_or(0);
  return value > 0 && value <= kMax ? value : 0;
}

bool read_range(std::string_view text, Variable& variable) {
  const size_t dots = text.find("..");
  if (dots == text.npos) return false;
  const size_t colon = text.find(':', dots);
  const std::string_view step = colon == text.npos ? "1" : text.substr(colon + 1);
  variable.least = read_number(text.substr(0, dots));
  variable.most = read_number(text.substr(dots + 2, colon == text.npos ? colon : colon - dots - 2));
  variable.step = step == "pow2" ? 0 : read_number(step);
  return variable.least > 0 && variable.least <= variable.most && (step == "pow2" || variable.step > 0);
}

bool read_list(std::string_view text, Variable& variable) {
  while (true) {
    const size_t comma = text.find(',');
    variable.list.push_back(read_number(text.substr(0, comma)));
    if (variable.list.back() == 0) return false;
    if (comma == text.npos) break;
    text = text.substr(comma + 1);
  }
  std::sort(variable.list.begin(), variable.list.end());
  variable.list.erase(std::unique(variable.list.begin(), variable.list.end()), variable.list.end());
  variable.least = variable.list.front();
  variable.most = variable.list.back();
  return true;
}

}  // namespace

int64_t Variable::count() const {
  if (!list.empty()) return static_cast<int64_t>(list.size());
  if (step > 0) return (most - least) / step + 1;
  int64_t doublings = 1;
  for (int64_t value = least; value <= most / 2; value *= 2) ++doublings;
  return doublings;
}

int64_t Variable::position_of(double limit) const {
  const auto value_of = [this](int64_t position) { return value(position); };
  return std::max<int64_t>(0, find_position(count(), value_of, limit));
}

int64_t Variable::value(int64_t position) const {
  if (!list.empty()) return list[static_cast<size_t>(position)];
  return step > 0 ? least + position * step : least << position;
}

Values parse_values(const std::string& text, std::span<const Variable> variables) {
  Values values;
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::string_view one = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), one.size() + 1));
    const size_t equals = one.find('=');
    if (equals == one.npos) break;
    values[std::string(one.substr(0, equals))] = read_number(one.substr(equals + 1));
  }
  for (const Variable& variable : variables) {
    if (variable.count() == 1) values.try_emplace(variable.name, variable.value(0));
    if (values[variable.name] <= 0 || values.size() > variables.size()) {
      throw Error(ErrorKind::usage, fmt::format("'{}' gives no value for {}", text, variable.name),
                  fmt::format("as in: {}=48", variable.name));
    }
  }
  return values;
}

std::string describe(const Values& values) {
  std::string text;
  for (const auto& [name, value] : values) text += fmt::format("{}{} = {}", text.empty() ? "" : ", ", name, value);
  return text;
}

std::vector<Values> combine(std::span<const Variable> variables) {
  std::vector<Values> all{{}};
  for (const Variable& variable : variables) {
    std::vector<Values> longer;
    for (const Values& values : all) {
      for (int64_t k = 0; k < variable.count(); ++k) {
        longer.push_back(values);
        longer.back()[variable.name] = variable.value(k);
      }
    }
    all = std::move(longer);
  }
  return all;
}

Variable parse_variable(const std::string& text) {
  Variable variable;
  const size_t equals = text.find('=');
  if (equals != text.npos && equals > 0) {
    const std::string_view values = std::string_view(text).substr(equals + 1);
    variable.name = text.substr(0, equals);
    if (read_range(values, variable) || (values.find("..") == values.npos && read_list(values, variable)))
      return variable;
  }
  if (variable.most > 0 && variable.least > variable.most) {
    throw Error(ErrorKind::usage, fmt::format("--vary '{}': {} is above {}", text, variable.least, variable.most),
                fmt::format("the smaller one comes first: {}={}..{}", variable.name, variable.most, variable.least));
  }
  throw Error(ErrorKind::usage, fmt::format("--vary '{}' names no positive numbers", text),
              "as in: batch=1..65536, batch=8..512:8, batch=1..1024:pow2, or seq=128,256,512");
}

}  // namespace oomdiag
