#include "profiler/cost/operator_work.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>

#include "profiler/cost/metered_operator.h"
#include "profiler/cost/products.h"
#include "profiler/meter_words.h"
#include "profiler/one_of.h"

namespace oomdiag {
namespace {

struct NamedKind {
  std::string_view part;  ///< of the operator's name
  WorkKind kind;
};
/// The first that fits. Read from the top: a convolution's name has no other part in it, "_backward" is of many.
constexpr NamedKind kKinds[] = {
    {"scaled_dot_product", WorkKind::attention},
    {"flash_attention", WorkKind::attention},
    {"efficient_attention", WorkKind::attention},
    {"rnn", WorkKind::rnn},
    {"_foreach_", WorkKind::optimizer},
    {"_fused_", WorkKind::optimizer},
    {"_norm", WorkKind::normalization},
    {"softmax", WorkKind::softmax},
    {"pool", WorkKind::pooling},
    {"upsample_nearest", WorkKind::pooling},
    {"upsample", WorkKind::interpolation},
    {"embedding_dense_backward", WorkKind::embedding_gradient},
    {"embedding", WorkKind::indexing},
    {"index", WorkKind::indexing},
    {"gather", WorkKind::indexing},
    {"scatter", WorkKind::indexing},
    {"nll_loss", WorkKind::label_loss},
    {"sort", WorkKind::indexing},
    {"topk", WorkKind::indexing},
    {"copy", WorkKind::copy},
    {"cat", WorkKind::copy},
    {"roll", WorkKind::copy},
    {"flip", WorkKind::copy},
    {"sum", WorkKind::reduction},
    {"mean", WorkKind::reduction},
    {"amax", WorkKind::reduction},
    {"amin", WorkKind::reduction},
    {"argm", WorkKind::reduction},
    {"var", WorkKind::reduction},
    {"linalg_vector", WorkKind::reduction},
    {"linalg_solve_ex", WorkKind::factorization},
    {"linalg_inv_ex", WorkKind::factorization},
    {"linalg_lu_factor", WorkKind::factorization},
    {"linalg_cholesky_ex", WorkKind::factorization},
    {"linalg_qr", WorkKind::factorization},
    {"linalg_svd", WorkKind::factorization},
    {"linalg_eigh", WorkKind::factorization},
};

/// A group of one channel in and one out, whose only other factor is the window.
WorkKind convolution_kind_of(const MatrixProduct& product) {
  constexpr int64_t kMaxWindow = 128;
  if (product.batch == 1) return WorkKind::convolution;
  const bool is_narrow = std::min(product.m, product.n) == 1 && std::min(product.n, product.k) <= kMaxWindow &&
                         std::min(product.m, product.k) <= kMaxWindow;
  return is_narrow ? WorkKind::depthwise_convolution : WorkKind::grouped_convolution;
}

WorkKind work_kind_of(const MeteredOperator& metered, const OperatorWork& work) {
  const std::string_view name = metered.name;
  if (name.starts_with(kKernelPrefix)) return WorkKind::fused;
  if (!work.products.empty() && name.find("conv") != name.npos) {
    return convolution_kind_of(work.products.front());
  }
  for (const NamedKind& named : kKinds) {
    if (name.find(named.part) != name.npos) return named.kind;
  }
  if (!work.products.empty()) {
    return work.precision == WorkPrecision::fp32 ? WorkKind::fp32_product : WorkKind::matrix_product;
  }
  return name.starts_with("aten::") ? WorkKind::elementwise : WorkKind::other;
}

WorkPrecision precision_of(const MeteredOperator& metered) {
  for (const WorkValue& value : metered.inputs) {
    const std::string_view dtype = value.dtype;
    if (dtype == "Float" || dtype == "ComplexFloat") return WorkPrecision::fp32;
    if (dtype == "Half") return WorkPrecision::fp16;
    if (dtype == "BFloat16") return WorkPrecision::bf16;
    if (dtype == "Double" || dtype == "ComplexDouble") return WorkPrecision::fp64;
    if (dtype.starts_with("Float8")) return WorkPrecision::fp8;
    if (dtype == "Char" || dtype == "Byte") return WorkPrecision::int8;
  }
  return WorkPrecision::other;
}

int64_t bytes_on_gpu(const std::vector<WorkValue>& values) {
  int64_t sum = 0;
  for (const WorkValue& value : values) sum += value.on_host ? 0 : value.bytes;
  return sum;
}

/// A copy between host and GPU.
bool crosses_bus(const MeteredOperator& metered) {
  return metered.name == "aten::copy_" && metered.inputs.size() > 1 &&
         metered.inputs[0].on_host != metered.inputs[1].on_host;
}

/// Their first input is only written.
bool writes_self_only(std::string_view name) {
  return is_one_of(name, {"aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_",
                          "aten::bernoulli_", "aten::random_", "aten::exponential_"});
}

/// They read of their first input what they write and no more.
bool reads_what_it_writes(std::string_view name) {
  return is_one_of(name, {"aten::embedding", "aten::index", "aten::index_select", "aten::gather",
                          "aten::nll_loss_forward", "aten::nll_loss2d_forward"});
}

/// What kernels over lists of tensors write in place, which they do not return: the first list, or all but the gradients.
int64_t bytes_written_in_lists(const MeteredOperator& metered) {
  const std::string_view name = metered.name;
  const bool is_fused = name.starts_with("aten::_fused_");
  if (!name.ends_with('_') || (!is_fused && !name.starts_with("aten::_foreach_"))) return 0;
  int64_t sum = 0;
  for (size_t i = 0; i < metered.inputs.size(); ++i) {
    const bool is_written = is_fused ? i != 1 : i == 0;
    if (is_written && metered.inputs[i].kind == WorkValue::Kind::list) sum += metered.inputs[i].bytes;
  }
  return sum;
}

int64_t memory_bytes_of(const MeteredOperator& metered) {
  const int64_t read = bytes_on_gpu(metered.inputs), written = bytes_on_gpu(metered.outputs);
  if (is_one_of(metered.name, {"aten::nll_loss_backward", "aten::nll_loss2d_backward"})) return written;
  const int64_t first = metered.inputs.empty() || metered.inputs[0].on_host ? 0 : metered.inputs[0].bytes;
  if (writes_self_only(metered.name)) return read - first + written;
  if (reads_what_it_writes(metered.name)) return read - first + 2 * written;
  return read + written + bytes_written_in_lists(metered);
}

/// Singular values and eigenvalues come of several sweeps over all columns.
int64_t columns_in_turn(const MeteredOperator& metered) {
  constexpr int64_t kSweeps = 4;
  const std::string_view name = metered.name;
  const bool has_sweeps = name.find("svd") != name.npos || name.find("eigh") != name.npos;
  const bool is_matrix = !metered.inputs.empty() && metered.inputs[0].values.size() > 1;
  return (is_matrix ? metered.inputs[0].values.back() : 1) * (has_sweeps ? kSweeps : 1);
}

/// Lists of tensors are worked on by few kernels: PyTorch's multi-tensor kernels take 30 to 110 tensors each, by how many lists there
/// are (ATen/native/cuda/MultiTensorApply.cuh, depth_to_max_tensors).
/// A step of a recurrent network is a kernel at least, and one that sorts indices many: a radix sort has passes, of which each has some.
/// A factorization has one for each column, which needs those before.
int64_t launches_of(const MeteredOperator& metered, const OperatorWork& work) {
  constexpr int64_t kTensorsOfLaunch = 30, kOfSort = 18;
  if (work.kind == WorkKind::factorization) return columns_in_turn(metered);
  if (work.kind == WorkKind::embedding_gradient) return kOfSort;
  if (work.kind == WorkKind::rnn) {
    int64_t launches = 0;
    for (const MatrixProduct& product : work.products) launches += product.steps;
    return std::max<int64_t>(launches, 1);
  }
  if (work.kind != WorkKind::optimizer) return 1;
  return (work.tensors + kTensorsOfLaunch - 1) / kTensorsOfLaunch;
}

/// Whether batch normalization takes its statistics from the batch: its first flag says so; cuDNN's backward has none.
bool is_in_training(const MeteredOperator& metered) {
  const auto is_number = [](const WorkValue& value) { return value.kind == WorkValue::Kind::number; };
  const auto flag = std::ranges::find_if(metered.inputs, is_number);
  return flag == metered.inputs.end() || flag->values[0] != 0;
}

std::vector<const WorkValue*> inputs_and_outputs(const MeteredOperator& metered) {
  std::vector<const WorkValue*> all;
  for (const auto* values : {&metered.inputs, &metered.outputs}) {
    for (const WorkValue& value : *values) all.push_back(&value);
  }
  return all;
}

int64_t elements_of(const WorkValue& value) {
  if (!value.is_tensor()) return 0;
  int64_t elements = 1;
  for (const int64_t size : value.values) elements *= size;
  return elements;
}

/// [N, C, ...], of which C are the channels. Inference has one kernel over all elements.
std::optional<SerialBlocks> channels_of(const MeteredOperator& metered) {
  const std::string_view name = metered.name;
  const bool is_cudnn = name.starts_with("aten::cudnn_batch_norm");
  if (!is_cudnn && !name.starts_with("aten::native_batch_norm")) return std::nullopt;
  if (!is_in_training(metered)) return std::nullopt;
  const auto input =
      std::ranges::find_if(metered.inputs, [](const WorkValue& value) { return value.values.size() > 1; });
  if (input == metered.inputs.end() || !input->is_tensor() || input->values[1] == 0) return std::nullopt;
  const int64_t channels = input->values[1];
  return SerialBlocks{.blocks = channels, .elements = elements_of(*input) / channels, .of_cudnn = is_cudnn};
}

/// Of the output [N, C, ...], by ATen/native/cuda/UpSampleBilinear2d.cu and its like.
std::optional<SerialBlocks> places_of(const MeteredOperator& metered) {
  constexpr int64_t kThreadsOfBlock = 1024;
  if (metered.outputs.empty() || metered.outputs[0].values.size() < 3) return std::nullopt;
  const std::vector<int64_t>& shape = metered.outputs[0].values;
  const int64_t turns = shape[0] * shape[1];
  if (turns == 0) return std::nullopt;
  return SerialBlocks{.blocks = divide_up(elements_of(metered.outputs[0]) / turns, kThreadsOfBlock), .elements = turns};
}

/// Of [N, C] one thread block takes all N, by ATen/native/cuda/Loss.cu; where there are more dimensions all do.
std::optional<SerialBlocks> rows_of_label_loss(const MeteredOperator& metered) {
  const bool is_matrix = metered.name == "aten::nll_loss_forward" || metered.name == "aten::nll_loss_backward";
  const size_t input = metered.name == "aten::nll_loss_backward" ? 1 : 0;
  if (!is_matrix || metered.inputs.size() <= input || metered.inputs[input].values.size() != 2) return std::nullopt;
  return SerialBlocks{.blocks = 1, .elements = metered.inputs[input].values[0]};
}

std::optional<SerialBlocks> serial_blocks_of(const MeteredOperator& metered, const OperatorWork& work) {
  if (work.kind == WorkKind::label_loss) return rows_of_label_loss(metered);
  if (work.kind != WorkKind::interpolation) return channels_of(metered);
  return work.is_backward ? std::nullopt : places_of(metered);
}

int64_t most_elements(const MeteredOperator& metered) {
  int64_t most = 0;
  for (const WorkValue* value : inputs_and_outputs(metered)) most = std::max(most, elements_of(*value));
  return most;
}

/// Casts of float32 to half precision have a kernel of their own.
bool is_quick_cast(const MeteredOperator& metered) {
  return metered.name == "aten::copy_" && metered.inputs.size() > 1 && metered.inputs[1].dtype == "Float" &&
         (metered.inputs[0].dtype == "Half" || metered.inputs[0].dtype == "BFloat16");
}

/// Masks are of another dtype, and change nothing.
ElementOrder order_of(const MeteredOperator& metered) {
  const WorkValue* first = nullptr;
  bool is_mixed = false;
  for (const WorkValue* value : inputs_and_outputs(metered)) {
    if (value->on_host || elements_of(*value) < 2) continue;
    if (value->strided) return ElementOrder::strided;
    if (first == nullptr) first = value;
    const bool is_other_dtype = value->dtype != first->dtype && value->dtype != "Bool" && first->dtype != "Bool";
    is_mixed = is_mixed || value->values != first->values || (is_other_dtype && !is_quick_cast(metered));
  }
  return is_mixed ? ElementOrder::mixed : ElementOrder::plain;
}

int64_t power_of_two_in(int64_t length) { return length == 0 ? 8 : std::min<int64_t>(8, length & -length); }

/// Matrices are read in pieces of so many elements as divide their rows; the rows of a transposed one are its columns.
int64_t alignment_of(const MeteredOperator& metered) {
  int64_t alignment = 8;
  for (const WorkValue* value : inputs_and_outputs(metered)) {
    const size_t dimensions = value->is_tensor() ? value->values.size() : 0;
    if (dimensions < 2) continue;
    alignment = std::min(alignment, power_of_two_in(value->values[dimensions - (value->strided ? 2 : 1)]));
  }
  return alignment;
}

/// native_layer_norm(input, normalized_shape, weight, …) and its backward, whose statistics have an element for each row.
int64_t rows_of_layer_norm(const MeteredOperator& metered) {
  int64_t fewest = most_elements(metered);
  for (const WorkValue* value : inputs_and_outputs(metered)) {
    if (value->values.size() > 1 && elements_of(*value) > 0) fewest = std::min(fewest, elements_of(*value));
  }
  return fewest;
}

bool has_bias(const MeteredOperator& metered) {
  constexpr size_t kBias = 2;
  return metered.name == "aten::convolution" && metered.inputs.size() > kBias && metered.inputs[kBias].is_tensor();
}

/// Sums over all rows of a matrix, as gradients of biases are: few thread blocks have all rows. From some number on they are more.
int64_t rows_of_sum(const MeteredOperator& metered) {
  constexpr int64_t kMaxRows = 65536;
  if (metered.inputs.empty() || metered.outputs.empty()) return 0;
  const WorkValue &input = metered.inputs[0], &output = metered.outputs[0];
  const bool keeps_columns = input.values.size() > 1 && !output.values.empty() &&
                             output.values.back() == input.values.back() && elements_of(output) > 1;
  return keeps_columns ? std::min(kMaxRows, elements_of(input) / elements_of(output)) : 0;
}

/// Whether the flag `is_causal` of scaled_dot_product_attention was given; native_functions.yaml has its place.
bool has_causal_flag(const MeteredOperator& metered) {
  struct Flag {
    std::string_view name;
    size_t place;
  };
  constexpr Flag kFlags[] = {{"aten::_scaled_dot_product_efficient_attention", 6},
                             {"aten::_scaled_dot_product_efficient_attention_backward", 11},
                             {"aten::_scaled_dot_product_cudnn_attention", 6},
                             {"aten::_scaled_dot_product_cudnn_attention_backward", 14},
                             {"aten::_scaled_dot_product_flash_attention", 4},
                             {"aten::_scaled_dot_product_flash_attention_backward", 11}};
  const auto* const flag = std::ranges::find(kFlags, metered.name, &Flag::name);
  if (flag == std::end(kFlags) || metered.inputs.size() <= flag->place) return false;
  const WorkValue& value = metered.inputs[flag->place];
  return value.kind == WorkValue::Kind::number && value.values[0] != 0;
}

/// Of convolution(input, weight, …) and convolution_backward(gradient, input, weight, …).
int64_t window_of(const MeteredOperator& metered, const OperatorWork& work) {
  const size_t weight = work.is_backward ? 2 : 1;
  if (metered.name.find("convolution") == metered.name.npos || metered.inputs.size() <= weight) return 1;
  int64_t window = 1;
  const std::vector<int64_t>& shape = metered.inputs[weight].values;
  for (size_t i = 2; i < shape.size(); ++i) window *= shape[i];
  return window;
}

/// cuDNN's kernels for half precision with a stride of two, which PyTorch prefers to its own for many channels only.
bool suits_stride_of_two(const std::vector<int64_t>& input, int64_t filter) {
  constexpr int64_t kMany = 512, kWide = 28, kManyOfWide = 256;
  if (filter == 1) return false;
  return input[0] == 1 || input[1] >= kMany || (input[1] >= kManyOfWide && input[3] >= kWide);
}

/// Of convolution(input, weight, …) > output and convolution_backward(gradient, input, weight, …).
DepthwiseKernel depthwise_kernel_of(const MeteredOperator& metered, const OperatorWork& work) {
  constexpr int64_t kFewestChannels = 32, kLeastWidth = 7;
  const size_t input_at = work.is_backward ? 1 : 0;
  const WorkValue &input = metered.inputs[input_at], &weight = metered.inputs[input_at + 1];
  if (input.strided) return DepthwiseKernel::cudnn_channels_last;
  const WorkValue& output = work.is_backward ? metered.inputs[0] : metered.outputs[0];
  const bool is_image = input.values.size() == 4 && weight.values.size() == 4 && output.values.size() == 4;
  if (work.precision != WorkPrecision::fp16 || !is_image || output.values[3] == 0) return DepthwiseKernel::pytorch;
  const int64_t filter = weight.values[3], width = input.values[3];
  const bool is_known = filter == weight.values[2] && (filter == 1 || filter == 3 || filter == 5);
  if (!is_known || input.values[1] < kFewestChannels || width < kLeastWidth) return DepthwiseKernel::pytorch;
  const int64_t stride = std::lround(static_cast<double>(width) / static_cast<double>(output.values[3]));
  const bool is_cudnn = stride <= 1 || (stride == 2 && suits_stride_of_two(input.values, filter));
  return is_cudnn ? DepthwiseKernel::cudnn : DepthwiseKernel::pytorch;
}

bool writes_by_index(std::string_view name) {
  return name.find("scatter") != name.npos || name.find("index_add") != name.npos ||
         name.find("index_put") != name.npos || name.find("index_copy") != name.npos;
}

/// Elements that are added to rows of the table: (gradient, indices, …).
int64_t elements_to_add(const MeteredOperator& metered) {
  if (metered.inputs.size() < 2 || metered.inputs[0].values.empty()) return 0;
  return elements_of(metered.inputs[1]) * metered.inputs[0].values.back();
}

int64_t turns_of(const MeteredOperator& metered, const OperatorWork& work) {
  switch (work.kind) {
    case WorkKind::embedding_gradient:
      return elements_to_add(metered);
    case WorkKind::elementwise:
    case WorkKind::copy:
      return work.order == ElementOrder::plain ? 0 : most_elements(metered);
    case WorkKind::convolution:
    case WorkKind::grouped_convolution:
      return has_bias(metered) && !metered.outputs.empty() ? elements_of(metered.outputs[0]) : 0;
    case WorkKind::depthwise_convolution:
      return work.is_backward ? most_elements(metered) : metered.outputs.empty() ? 0 : elements_of(metered.outputs[0]);
    case WorkKind::reduction:
      return rows_of_sum(metered);
    default:
      return work.is_layer_norm ? rows_of_layer_norm(metered) : 0;
  }
}

}  // namespace

std::string_view name_of(WorkPrecision precision) {
  constexpr std::string_view kNames[] = {"fp32", "fp16", "bf16", "fp64", "fp8", "int8", "other"};
  return kNames[static_cast<size_t>(precision)];
}

std::string_view name_of(WorkKind kind) {
  constexpr std::string_view kNames[] = {"matrix_product",
                                         "fp32_product",
                                         "convolution",
                                         "grouped_convolution",
                                         "depthwise_convolution",
                                         "attention",
                                         "rnn",
                                         "elementwise",
                                         "normalization",
                                         "softmax",
                                         "reduction",
                                         "pooling",
                                         "interpolation",
                                         "indexing",
                                         "embedding_gradient",
                                         "label_loss",
                                         "copy",
                                         "factorization",
                                         "optimizer",
                                         "fused",
                                         "other"};
  return kNames[static_cast<size_t>(kind)];
}

int64_t OperatorWork::flops() const {
  int64_t sum = 0;
  for (const MatrixProduct& product : products) sum += product.flops();
  return sum;
}

OperatorWork work_of(const MeteredOperator& metered) {
  OperatorWork work;
  if (metered.name == kViews) return {.kind = WorkKind::other, .launches = 0, .is_metered = true};
  const std::optional<std::vector<MatrixProduct>> products = products_of(metered);
  work.is_metered = products.has_value();
  work.products = products.value_or(std::vector<MatrixProduct>{});
  work.precision = precision_of(metered);
  work.kind = work_kind_of(metered, work);
  work.is_backward = work.kind != WorkKind::elementwise && work.kind != WorkKind::fused &&
                     metered.name.find("_backward") != metered.name.npos;
  work.memory_bytes = memory_bytes_of(metered);
  if (crosses_bus(metered)) work.bus_bytes = work.memory_bytes;
  work.serial_blocks = serial_blocks_of(metered, work);
  if (!metered.inputs.empty()) work.tensors = std::max<int64_t>(1, metered.inputs[0].count);
  work.launches = launches_of(metered, work);
  work.order = order_of(metered);
  work.alignment = alignment_of(metered);
  work.window = window_of(metered, work);
  if (work.kind == WorkKind::depthwise_convolution) work.depthwise = depthwise_kernel_of(metered, work);
  work.scatters = writes_by_index(metered.name);
  work.is_causal = has_causal_flag(metered);
  work.is_layer_norm = metered.name.starts_with("aten::native_layer_norm");
  work.turns = turns_of(metered, work);
  return work;
}

}  // namespace oomdiag
