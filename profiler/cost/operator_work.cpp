#include "profiler/cost/operator_work.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <numeric>

#include "profiler/error.h"

namespace oomdiag {
namespace {

using Shape = std::vector<int64_t>;

int64_t product(const Shape& shape, size_t from = 0) {
  int64_t all = 1;
  for (size_t i = from; i < shape.size(); ++i) all *= shape[i];
  return all;
}

std::vector<std::string_view> split_words(std::string_view text, char by) {
  std::vector<std::string_view> words;
  while (!text.empty()) {
    const size_t end = text.find(by);
    if (end != 0) words.push_back(text.substr(0, end));
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  return words;
}

int64_t parse_integer(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw Error(ErrorKind::input, fmt::format("'{}' is no number of a meter's file", text));
  }
  return number;
}

/// "Float:4:64x32", "i:5", "m:110" or "-".
WorkValue parse_work_value(std::string_view text) {
  const auto parts = split_words(text, ':');
  if (parts.empty() || parts[0] == "-") return {};
  WorkValue value;
  if (parts[0] == "i" && parts.size() == 2) {
    value.kind = WorkValue::Kind::number;
    value.values.push_back(parse_integer(parts[1]));
  } else if (parts[0] == "m" && parts.size() == 2) {
    value.kind = WorkValue::Kind::flags;
    for (const char flag : parts[1]) value.values.push_back(flag == '1' ? 1 : 0);
  } else if (parts.size() >= 2) {
    value.kind = WorkValue::Kind::tensor;
    value.dtype = parts[0];
    if (parts.size() > 2) {
      for (const std::string_view size : split_words(parts[2], 'x')) value.values.push_back(parse_integer(size));
    }
    value.bytes = parse_integer(parts[1]) * product(value.values);
  } else {
    throw Error(ErrorKind::input, fmt::format("'{}' is no value of a meter's file", text));
  }
  return value;
}

std::vector<WorkValue> parse_work_values(std::string_view text) {
  std::vector<WorkValue> values;
  for (const std::string_view word : split_words(text, ' ')) values.push_back(parse_work_value(word));
  return values;
}

bool is_tensor(const std::vector<WorkValue>& values, size_t i, size_t least_rank) {
  return i < values.size() && values[i].kind == WorkValue::Kind::tensor && values[i].values.size() >= least_rank;
}

constexpr int64_t kUnknown = -1;

/// `first` is the place of the left matrix, which the right one follows: [.., m, k] x [.., k, n].
int64_t matrix_product_flops(const MeteredOperator& op, size_t first) {
  if (!is_tensor(op.inputs, first, 2) || !is_tensor(op.inputs, first + 1, 2)) return kUnknown;
  return 2 * product(op.inputs[first].values) * op.inputs[first + 1].values.back();
}

/// Each element of the kernel meets each place of the side that it moves over: of the output, or if transposed of the input.
int64_t pass_flops(const Shape& side, const Shape& weight) { return 2 * side[0] * product(side, 2) * product(weight); }

bool is_transposed(const MeteredOperator& op, size_t i) {
  return i < op.inputs.size() && op.inputs[i].kind == WorkValue::Kind::number && op.inputs[i].values[0] != 0;
}

int64_t convolution_flops(const MeteredOperator& op) {
  constexpr size_t kTransposed = 6;
  if (!is_tensor(op.inputs, 0, 3) || !is_tensor(op.inputs, 1, 3) || !is_tensor(op.outputs, 0, 3)) return kUnknown;
  const WorkValue& side = is_transposed(op, kTransposed) ? op.inputs[0] : op.outputs[0];
  return pass_flops(side.values, op.inputs[1].values);
}

/// The gradients of the input and of the weight cost a pass each, where they are wanted.
int64_t convolution_backward_flops(const MeteredOperator& op) {
  constexpr size_t kTransposed = 7, kMask = 10;
  if (!is_tensor(op.inputs, 0, 3) || !is_tensor(op.inputs, 1, 3) || !is_tensor(op.inputs, 2, 3)) return kUnknown;
  if (op.inputs.size() <= kMask || op.inputs[kMask].values.size() < 2) return kUnknown;
  const WorkValue& side = is_transposed(op, kTransposed) ? op.inputs[1] : op.inputs[0];
  const Shape& mask = op.inputs[kMask].values;
  return (mask[0] + mask[1]) * pass_flops(side.values, op.inputs[2].values);
}

/// Query at `first`, then key and value: scores and their product with the values, twice the elements of each product.
int64_t attention_flops(const MeteredOperator& op, size_t first, bool heads_before_length, int products_of_scores,
                        int products_of_values) {
  for (size_t i = first; i < first + 3; ++i) {
    if (!is_tensor(op.inputs, i, 4)) return kUnknown;
  }
  const size_t length = heads_before_length ? 2 : 1;
  const Shape& query = op.inputs[first].values;
  const int64_t rows = product(query) / std::max<int64_t>(query.back(), 1);
  const int64_t keys = op.inputs[first + 1].values[length];
  return 2 * rows * keys *
         (products_of_scores * query.back() + products_of_values * op.inputs[first + 2].values.back());
}

int64_t flops_of(const MeteredOperator& op) {
  const std::string_view name = op.name;
  if (name == "aten::mm" || name == "aten::bmm") return matrix_product_flops(op, 0);
  if (name == "aten::addmm" || name == "aten::addmm_" || name == "aten::baddbmm" || name == "aten::_addmm_activation") {
    return matrix_product_flops(op, 1);
  }
  if (name == "aten::convolution") return convolution_flops(op);
  if (name == "aten::convolution_backward") return convolution_backward_flops(op);
  if (name == "aten::_scaled_dot_product_efficient_attention" || name == "aten::_scaled_dot_product_flash_attention" ||
      name == "aten::_scaled_dot_product_cudnn_attention") {
    return attention_flops(op, 0, true, 1, 1);
  }
  // The gradient's first: scores again, and the gradients of query and key, of value and scores.
  if (name == "aten::_scaled_dot_product_efficient_attention_backward" ||
      name == "aten::_scaled_dot_product_flash_attention_backward" ||
      name == "aten::_scaled_dot_product_cudnn_attention_backward") {
    return attention_flops(op, 1, true, 3, 2);
  }
  if (name.starts_with("aten::_cudnn_rnn") || name.starts_with("aten::_scaled_mm") || name == "aten::dot")
    return kUnknown;
  return 0;
}

WorkPrecision precision_of(const MeteredOperator& op) {
  for (const WorkValue& value : op.inputs) {
    if (value.kind != WorkValue::Kind::tensor) continue;
    if (value.dtype == "Float") return WorkPrecision::fp32;
    if (value.dtype == "Half") return WorkPrecision::fp16;
    if (value.dtype == "BFloat16") return WorkPrecision::bf16;
    if (value.dtype == "Double") return WorkPrecision::fp64;
    return WorkPrecision::other;
  }
  return WorkPrecision::other;
}

int64_t bytes_of(const std::vector<WorkValue>& values) {
  int64_t sum = 0;
  for (const WorkValue& value : values) sum += value.bytes;
  return sum;
}

}  // namespace

int64_t Work::all_flops() const { return std::accumulate(flops.begin(), flops.end(), int64_t{0}); }

Work& Work::operator+=(const Work& other) {
  for (size_t i = 0; i < flops.size(); ++i) flops[i] += other.flops[i];
  memory_bytes += other.memory_bytes;
  launches += other.launches;
  not_metered += other.not_metered;
  return *this;
}

MeteredOperator parse_metered_operator(std::string_view line) {
  constexpr size_t kFields = 5;  // of which the last has inputs, '>' and outputs
  const auto fields = split_words(line, '\t');
  if (fields.size() != kFields) throw Error(ErrorKind::input, fmt::format("'{}' is no line of a meter's file", line));
  const size_t arrow = fields[4].find('>');
  if (arrow == std::string_view::npos) {
    throw Error(ErrorKind::input, fmt::format("'{}' is no line of a meter's file", line));
  }
  return {.step = parse_integer(fields[0]),
          .phase = std::string(fields[1]),
          .name = std::string(fields[2]),
          .count = parse_integer(fields[3]),
          .inputs = parse_work_values(fields[4].substr(0, arrow)),
          .outputs = parse_work_values(fields[4].substr(arrow + 1))};
}

Work work_of(const MeteredOperator& metered) {
  Work work;
  if (metered.name.starts_with("aten::empty")) return work;  // it only takes memory
  const int64_t flops = flops_of(metered);
  work.not_metered = flops == kUnknown ? metered.count : 0;
  work.flops[static_cast<size_t>(precision_of(metered))] = flops == kUnknown ? 0 : flops * metered.count;
  work.memory_bytes = (bytes_of(metered.inputs) + bytes_of(metered.outputs)) * metered.count;
  work.launches = metered.count;
  return work;
}

Work work_of_step(const std::vector<MeteredOperator>& operators, int64_t step) {
  Work sum;
  for (const MeteredOperator& metered : operators) {
    if (metered.step == step) sum += work_of(metered);
  }
  return sum;
}

}  // namespace oomdiag
