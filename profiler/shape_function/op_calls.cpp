#include "profiler/shape_function/op_calls.h"

#include <algorithm>
#include <charconv>
#include <istream>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "profiler/whole_number.h"

namespace oomdiag {
namespace {

constexpr char kNumber = '#';

struct SplitCall {
  std::string form{};
  std::vector<int64_t> numbers{};
};

/// nullopt where a number is none of 64 bits, or the text has our own mark outside of quotes.
std::optional<SplitCall> split_numbers(std::string_view text) {
  SplitCall split;
  bool quoted = false;
  for (size_t i = 0; i < text.size();) {
    const char c = text[i];
    const bool begins_number = !quoted && (is_digit(c) || c == '-');
    if (!begins_number) {
      if (c == '"') quoted = !quoted;
      if (c == kNumber && !quoted) return std::nullopt;
      split.form += c;
      ++i;
      continue;
    }
    int64_t number = 0;
    const auto [end, error] = std::from_chars(text.data() + i, text.data() + text.size(), number);
    if (error != std::errc()) return std::nullopt;
    split.form += kNumber;
    split.numbers.push_back(number);
    i = static_cast<size_t>(end - text.data());
  }
  if (quoted) return std::nullopt;
  return split;
}

}  // namespace

uint32_t OpCalls::find(uint32_t id) const {
  const auto found = std::ranges::lower_bound(calls, id, {}, &Call::id);
  return found == calls.end() || found->id != id ? kNone : static_cast<uint32_t>(found - calls.begin());
}

OpCalls read_op_calls(std::istream& lines) {
  OpCalls result;
  std::unordered_map<std::string, uint32_t> forms;
  for (std::string line; std::getline(lines, line);) {
    uint32_t id = 0;
    const char* const last = line.data() + line.size();
    const auto [end, error] = std::from_chars(line.data(), last, id);
    if (error != std::errc() || end == last || *end != '\t' || line.back() != '}') continue;
    std::optional<SplitCall> split = split_numbers(std::string_view(end + 1, last));
    if (!split) continue;
    const auto [entry, is_new] = forms.try_emplace(split->form, static_cast<uint32_t>(result.forms.size()));
    if (is_new) result.forms.push_back(split->form);
    result.calls.push_back({.id = id, .form = entry->second, .numbers = std::move(split->numbers)});
  }
  std::ranges::stable_sort(result.calls, {}, &OpCalls::Call::id);
  return result;
}

std::string write_op_call(const std::string& form, const std::vector<int64_t>& numbers) {
  std::string text;
  size_t next = 0;
  bool quoted = false;
  for (const char c : form) {
    if (c == '"') quoted = !quoted;
    if (c == kNumber && !quoted && next < numbers.size()) {
      text += std::to_string(numbers[next++]);
    } else {
      text += c;
    }
  }
  return text;
}

}  // namespace oomdiag
