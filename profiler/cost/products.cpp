#include "profiler/cost/products.h"

#include <algorithm>
#include <cstddef>

#include "profiler/cost/metered_operator.h"
#include "profiler/meter_words.h"
#include "profiler/one_of.h"

namespace oomdiag {
namespace {

using Shape = std::vector<int64_t>;
using Products = std::optional<std::vector<MatrixProduct>>;

int64_t multiply(const Shape& shape, size_t from = 0, size_t until = SIZE_MAX) {
  int64_t all = 1;
  for (size_t i = from; i < std::min(until, shape.size()); ++i) all *= shape[i];
  return all;
}

/// The shape of the tensor at `i`, null if there is none of at least so many dimensions.
const Shape* shape_at(const std::vector<WorkValue>& values, size_t i, size_t least_dimensions) {
  const bool is_there = i < values.size() && values[i].is_tensor() && values[i].values.size() >= least_dimensions;
  return is_there ? &values[i].values : nullptr;
}

int64_t number_at(const MeteredOperator& metered, size_t i, int64_t otherwise) {
  const bool is_there = i < metered.inputs.size() && metered.inputs[i].kind == WorkValue::Kind::number;
  return is_there ? metered.inputs[i].values[0] : otherwise;
}

/// [.., m, k] x [.., k, n], the left matrix at `left`, the right one after it.
Products matrix_product(const MeteredOperator& metered, size_t left) {
  const Shape* a = shape_at(metered.inputs, left, 2);
  const Shape* b = shape_at(metered.inputs, left + 1, 1);
  if (a == nullptr || b == nullptr) return std::nullopt;
  const int64_t n = b->size() == 1 ? 1 : b->back();
  return {{{.batch = multiply(*a, 0, a->size() - 2), .m = (*a)[a->size() - 2], .n = n, .k = a->back()}}};
}

/// _grouped_mm(a, b, ends of the groups): rows of [M, K] are multiplied by the matrix of their group in [G, K, N]; the
/// gradient of those is a product of two matrices whose inner dimension is cut into groups. Groups are taken to be of
/// equal size.
Products grouped_product(const MeteredOperator& metered) {
  const Shape* a = shape_at(metered.inputs, 0, 2);
  const Shape* b = shape_at(metered.inputs, 1, 2);
  const Shape* ends = shape_at(metered.inputs, 2, 1);
  if (a != nullptr && b != nullptr && a->size() == 3 && b->size() == 3) return matrix_product(metered, 0);
  if (a == nullptr || b == nullptr || ends == nullptr || ends->front() < 1) return std::nullopt;
  const int64_t groups = ends->front();
  if (a->size() == 3) return {{{.batch = groups, .m = (*a)[1], .n = b->back() / groups, .k = a->back()}}};
  if (b->size() == 3) return {{{.batch = groups, .m = a->front() / groups, .n = b->back(), .k = a->back()}}};
  return {{{.batch = groups, .m = a->front(), .n = b->back(), .k = a->back() / groups}}};
}

Products inner_product(const MeteredOperator& metered) {
  const Shape* a = shape_at(metered.inputs, 0, 1);
  if (a == nullptr) return std::nullopt;
  return {{{.m = 1, .n = 1, .k = a->back()}}};
}

/// A convolution as the product that it is: a row for each place that the kernel visits, which are those of the output, or of the input
/// if it is transposed. A group is a product of its own.
struct Convolution {
  int64_t groups = 1, places = 0, in = 0, out = 0, window = 0;
};

std::optional<Convolution> read_convolution(const Shape& visited, const Shape& weight, int64_t groups,
                                            bool transposed) {
  if (groups < 1 || weight.empty() || weight[0] % groups != 0) return std::nullopt;
  Convolution one{.groups = groups, .places = visited[0] * multiply(visited, 2), .window = multiply(weight, 2)};
  one.out = transposed ? weight[1] : weight[0] / groups;
  one.in = transposed ? weight[0] / groups : weight[1];
  return one;
}

/// convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
Products convolution(const MeteredOperator& metered) {
  const bool transposed = number_at(metered, 6, 0) != 0;
  const Shape* weight = shape_at(metered.inputs, 1, 3);
  const Shape* visited = transposed ? shape_at(metered.inputs, 0, 3) : shape_at(metered.outputs, 0, 3);
  if (weight == nullptr || visited == nullptr) return std::nullopt;
  const auto one = read_convolution(*visited, *weight, number_at(metered, 8, 1), transposed);
  if (!one) return std::nullopt;
  return {{{.batch = one->groups, .m = one->places, .n = one->out, .k = one->in * one->window, .window = one->window}}};
}

/// convolution_backward(grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
/// output_mask): the gradients of the input and of the weight, where they are requested.
Products convolution_backward(const MeteredOperator& metered) {
  constexpr size_t kMask = 10;
  const bool transposed = number_at(metered, 7, 0) != 0;
  const Shape* visited = shape_at(metered.inputs, transposed ? 1 : 0, 3);
  const Shape* weight = shape_at(metered.inputs, 2, 3);
  if (weight == nullptr || visited == nullptr || metered.inputs.size() <= kMask) return std::nullopt;
  const Shape& mask = metered.inputs[kMask].values;
  const auto one = read_convolution(*visited, *weight, number_at(metered, 9, 1), transposed);
  if (!one || mask.size() < 2) return std::nullopt;
  std::vector<MatrixProduct> products;
  if (mask[0] != 0) {
    products.push_back(
        {.batch = one->groups, .m = one->places, .n = one->in, .k = one->out * one->window, .window = one->window});
  }
  if (mask[1] != 0) {
    products.push_back({.batch = one->groups, .m = one->out, .n = one->in * one->window, .k = one->places});
  }
  return products;
}

/// Query, key and value from `first` on: scores and their product with the values. In backward the scores again, and the gradients of
/// scores, values, query and key. A causal mask does not halve them.
Products attention(const MeteredOperator& metered, size_t first, bool heads_before_length, bool is_backward) {
  const Shape* query = shape_at(metered.inputs, first, 4);
  const Shape* key = shape_at(metered.inputs, first + 1, 4);
  const Shape* value = shape_at(metered.inputs, first + 2, 4);
  if (query == nullptr || key == nullptr || value == nullptr) return std::nullopt;
  const size_t length = heads_before_length ? 2 : 1;
  const size_t heads = heads_before_length ? 1 : 2;
  const int64_t batch = (*query)[0] * (*query)[heads];
  const int64_t rows = (*query)[length], columns = (*key)[length];
  const MatrixProduct scores{.batch = batch, .m = rows, .n = columns, .k = query->back()};
  const MatrixProduct weighted{.batch = batch, .m = rows, .n = value->back(), .k = columns};
  if (!is_backward) return {{scores, weighted}};
  return {{scores, scores, scores, weighted, weighted}};
}

/// What a recurrent network multiplies: all rows of its input at once by the weights for inputs, and at each step of each layer the rows of
/// a batch by the weights for the state, which are what is left of its matrices.
struct RecurrentNetwork {
  int64_t rows = 0, batch = 0, hidden = 0, layers = 0, directions = 0;
  int64_t gates = 0;      ///< rows of a matrix, those of both directions together
  int64_t all_width = 0;  ///< of the inputs of all layers

  int64_t steps() const { return rows / batch * layers; }
};

/// `first_state` is where the state, [layers x directions, batch, hidden], `mode` where the kind of network stands; behind that hidden size,
/// size of projections, layers, whether the batch comes first, dropout, training and whether there are two directions.
std::optional<RecurrentNetwork> read_recurrent(const MeteredOperator& metered, size_t first_state, size_t mode) {
  constexpr int64_t kLstm = 2, kGru = 3;  // of cudnnRNNMode_t
  const Shape* input = shape_at(metered.inputs, 0, 2);
  const Shape* state = shape_at(metered.inputs, first_state, 3);
  if (input == nullptr || state == nullptr || metered.inputs[1].kind != WorkValue::Kind::list) return std::nullopt;
  RecurrentNetwork one{.rows = multiply(*input, 0, input->size() - 1), .batch = (*state)[1]};
  one.hidden = number_at(metered, mode + 1, 0);
  one.layers = number_at(metered, mode + 3, 0);
  one.directions = number_at(metered, mode + 7, 0) != 0 ? 2 : 1;
  const int64_t kind = number_at(metered, mode, 0), projected = number_at(metered, mode + 2, 0);
  one.gates = one.directions * one.hidden * (kind == kLstm ? 4 : kind == kGru ? 3 : 1);
  if (one.batch < 1 || one.rows < one.batch || one.gates < 1 || one.layers < 1 || projected > 0) return std::nullopt;
  one.all_width = (metered.inputs[1].matrix_elements - one.layers * one.gates * one.hidden) / one.gates;
  return one;
}

/// Each of the matrices multiplies each row of the input once, by `passes`: where the steps are not known, and of projections.
Products all_rows_at_once(const MeteredOperator& metered, size_t passes) {
  const Shape* input = shape_at(metered.inputs, 0, 2);
  if (input == nullptr || metered.inputs.size() < 2 || metered.inputs[1].kind != WorkValue::Kind::list)
    return std::nullopt;
  const MatrixProduct pass{.m = multiply(*input, 0, input->size() - 1), .n = metered.inputs[1].matrix_elements, .k = 1};
  return std::vector<MatrixProduct>(passes, pass);
}

/// _cudnn_rnn(input, weights, first stride, buffer, state, cell, mode, …)
Products recurrent(const MeteredOperator& metered) {
  const auto one = read_recurrent(metered, 4, 6);
  if (!one) return all_rows_at_once(metered, 1);
  return {{{.m = one->rows, .n = one->gates, .k = one->all_width},
           {.batch = one->directions,
            .m = one->batch,
            .n = one->gates / one->directions,
            .k = one->hidden,
            .steps = one->steps()}}};
}

/// _cudnn_rnn_backward(input, weights, first stride, buffer, state, cell, output, its gradient, those of states, mode, …): the gradients of
/// the state at each step, those of the inputs and of both kinds of weights at once.
Products recurrent_backward(const MeteredOperator& metered) {
  const auto one = read_recurrent(metered, 4, 10);
  if (!one) return all_rows_at_once(metered, 2);
  const int64_t of_direction = one->gates / one->directions;
  return {{{.m = one->rows, .n = one->all_width, .k = one->gates},
           {.m = one->gates, .n = one->all_width, .k = one->rows},
           {.batch = one->layers * one->directions, .m = of_direction, .n = one->hidden, .k = one->rows},
           {.batch = one->directions, .m = one->batch, .n = one->hidden, .k = of_direction, .steps = one->steps()}}};
}

/// Operators that compute products of which there is no rule.
bool is_unknown(std::string_view name) {
  constexpr std::string_view kParts[] = {"conv",     "linalg_", "_fft",          "attention", "cdist",
                                         "cholesky", "_int_mm", "_mixed_dtypes", "_sparse"};
  if (!name.starts_with("aten::")) return true;
  if (name.starts_with("aten::lu_")) return true;
  if (name == "aten::linalg_vector_norm" || name.starts_with("aten::_conj")) return false;
  return std::ranges::any_of(kParts, [&](std::string_view part) { return name.find(part) != name.npos; });
}

/// What a kernel that no operator launches reads, and whether that is all that it does (extension/record/work_meter.h).
Products of_kernel(const MeteredOperator& metered) {
  const bool is_known = metered.inputs.size() > 1 && metered.inputs[1].kind == WorkValue::Kind::number &&
                        metered.inputs[1].values[0] != 0;
  return is_known ? Products(std::vector<MatrixProduct>{}) : std::nullopt;
}

}  // namespace

Products products_of(const MeteredOperator& metered) {
  const std::string_view name = metered.name;
  if (name.starts_with(kKernelPrefix)) return of_kernel(metered);
  if (is_one_of(name, {"aten::mm", "aten::bmm", "aten::mv", "aten::_scaled_mm"})) return matrix_product(metered, 0);
  if (is_one_of(name, {"aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::baddbmm_", "aten::addbmm", "aten::addmv",
                       "aten::_addmm_activation"})) {
    return matrix_product(metered, 1);
  }
  if (name == "aten::_grouped_mm") return grouped_product(metered);
  if (name == "aten::dot" || name == "aten::vdot") return inner_product(metered);
  if (name == "aten::convolution") return convolution(metered);
  if (name == "aten::convolution_backward") return convolution_backward(metered);
  if (name.starts_with("aten::_scaled_dot_product_")) {
    const bool is_backward = name.ends_with("_backward");
    return attention(metered, is_backward ? 1 : 0, /*heads_before_length=*/true, is_backward);
  }
  if (name == "aten::_flash_attention_forward" || name == "aten::_efficient_attention_forward") {
    return attention(metered, 0, /*heads_before_length=*/false, false);
  }
  if (name == "aten::_flash_attention_backward" || name == "aten::_efficient_attention_backward") {
    return attention(metered, 1, /*heads_before_length=*/false, true);
  }
  if (name == "aten::_cudnn_rnn") return recurrent(metered);
  if (name == "aten::_cudnn_rnn_backward") return recurrent_backward(metered);
  if (is_unknown(name)) return std::nullopt;
  return std::vector<MatrixProduct>{};
}

}  // namespace oomdiag
