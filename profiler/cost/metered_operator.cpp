#include "profiler/cost/metered_operator.h"

#include <fmt/format.h>

#include "profiler/error.h"
#include "profiler/meter_words.h"
#include "profiler/whole_number.h"

namespace oomdiag {
namespace {

[[noreturn]] void reject_line(std::string_view text) {
  throw Error(ErrorKind::input, fmt::format("'{}' is no part of a meter's file", text));
}

std::vector<std::string_view> split(std::string_view text, char by) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const size_t end = text.find(by);
    if (end != 0) parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  return parts;
}

int64_t integer_of(std::string_view text) {
  const std::optional<int64_t> number = parse_whole_number(text);
  if (!number) reject_line(text);
  return *number;
}

WorkValue parse_list(const std::vector<std::string_view>& parts) {
  return {.kind = WorkValue::Kind::list,
          .dtype = std::string(parts[1]),
          .bytes = integer_of(parts[3]),
          .matrix_elements = integer_of(parts[4]),
          .count = integer_of(parts[2])};
}

/// "Float:4:64x32", "Float:4:64x32@host", "Float:4:64x32~".
WorkValue parse_tensor(std::vector<std::string_view> parts) {
  constexpr std::string_view kHost = "@host";
  WorkValue value{.kind = WorkValue::Kind::tensor, .dtype = std::string(parts[0])};
  if (parts.back().ends_with(kHost)) {
    value.on_host = true;
    parts.back().remove_suffix(kHost.size());
  } else if (parts.back().ends_with('~')) {
    value.strided = true;
    parts.back().remove_suffix(1);
  }
  value.bytes = integer_of(parts[1]);
  for (const std::string_view size : split(parts.size() > 2 ? parts[2] : "", 'x')) {
    value.values.push_back(integer_of(size));
    value.bytes *= value.values.back();
  }
  return value;
}

WorkValue parse_value(std::string_view text) {
  const auto parts = split(text, ':');
  if (parts.empty() || text == "-") return {};
  if (parts[0] == "list" && parts.size() == 5) return parse_list(parts);
  if (parts[0] == "i" && parts.size() == 2) return {.kind = WorkValue::Kind::number, .values = {integer_of(parts[1])}};
  if (parts[0] == "m") {
    WorkValue value{.kind = WorkValue::Kind::flags};
    for (const char flag : parts.size() > 1 ? parts[1] : "") value.values.push_back(flag == '1' ? 1 : 0);
    return value;
  }
  if (parts.size() < 2) reject_line(text);
  return parse_tensor(parts);
}

std::vector<WorkValue> parse_values(std::string_view text) {
  std::vector<WorkValue> values;
  for (const std::string_view word : split(text, ' ')) values.push_back(parse_value(word));
  return values;
}

/// "8 nvlink,rdma", "8".
void parse_job(std::string_view text, MeteredRun& run) {
  const auto words = split(text, ' ');
  if (words.empty()) reject_line(text);
  run.ranks_per_host = integer_of(words[0]);
  if (words.size() > 1) run.links = words[1];
}

}  // namespace

MeteredOperator parse_metered_operator(std::string_view line) {
  constexpr size_t kFields = 6;  // of which the last has inputs, '>' and outputs
  const auto fields = split(line, '\t');
  const size_t arrow = fields.size() == kFields ? fields[5].find('>') : std::string_view::npos;
  if (arrow == std::string_view::npos) reject_line(line);
  const std::string_view name = fields[3].substr(0, fields[3].find(kOnOwnStream));
  return {.step = integer_of(fields[0]),
          .phase = std::string(fields[1]),
          .module = static_cast<uint32_t>(integer_of(fields[2])),
          .name = std::string(name),
          .on_own_stream = name.size() < fields[3].size(),
          .count = integer_of(fields[4]),
          .inputs = parse_values(fields[5].substr(0, arrow)),
          .outputs = parse_values(fields[5].substr(arrow + 1))};
}

MeteredRun parse_metered_run(std::string_view text) {
  constexpr std::string_view kSteps = "steps\t", kJob = "job\t";
  const auto lines = split(text, '\n');
  if (lines.empty() || !lines[0].starts_with(kSteps)) reject_line(text.substr(0, 40));
  MeteredRun run{.steps = integer_of(lines[0].substr(kSteps.size()))};
  for (size_t i = 1; i < lines.size(); ++i) {
    if (lines[i].starts_with(kJob)) {
      parse_job(lines[i].substr(kJob.size()), run);
    } else {
      run.operators.push_back(parse_metered_operator(lines[i]));
    }
  }
  return run;
}

}  // namespace oomdiag
