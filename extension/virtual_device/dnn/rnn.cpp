// Recurrent layers. The weight space follows from the descriptor (cuDNN documentation, cudnnGetRNNWeightParams: per
// pseudo-layer the input matrices of all gates, then the recurrent ones, then a projection; all biases after all
// matrices). The two temporary spaces are those that cuDNN 9.19 asked for on an H100, for LSTM and GRU, float32 and float16,
// one direction, one and two layers (scripts/calibrate); for anything else they are estimates by the same rule. The persistent
// algorithm that PyTorch takes for one layer in half precision was seen with a workspace three times as large.

#include <cudnn.h>

#include <vector>

#include "extension/virtual_device/dnn/handle.h"
#include "extension/virtual_device/dnn/real.h"
#include "extension/virtual_device/entry_point.h"

namespace {

struct Rnn {
  cudnnRNNMode_t mode{};
  cudnnRNNBiasMode_t bias{};
  cudnnDirectionMode_t direction{};
  cudnnDataType_t type{};
  int32_t input = 0, hidden = 0, projection = 0, layers = 0;

  size_t element_bytes() const { return type == CUDNN_DATA_DOUBLE ? 8 : type == CUDNN_DATA_FLOAT ? 4 : 2; }
  int gates() const { return mode == CUDNN_LSTM ? 4 : mode == CUDNN_GRU ? 3 : 1; }
  int directions() const { return direction == CUDNN_BIDIRECTIONAL ? 2 : 1; }
  int pseudo_layers() const { return layers * directions(); }
  int biases() const { return bias == CUDNN_RNN_NO_BIAS ? 0 : bias == CUDNN_RNN_DOUBLE_BIAS ? 2 : 1; }
  bool has_projection() const { return projection && projection != hidden; }
  size_t output_width() const { return static_cast<size_t>(projection ? projection : hidden); }
  size_t hidden_width() const { return static_cast<size_t>(hidden); }
  size_t input_width(int layer) const {
    return layer < directions() ? static_cast<size_t>(input) : output_width() * static_cast<size_t>(directions());
  }
  size_t gate_elements(int layer) const {
    return static_cast<size_t>(gates()) * hidden_width() * (input_width(layer) + output_width());
  }
  size_t layer_elements(int layer) const {
    return gate_elements(layer) + (has_projection() ? output_width() * hidden_width() : 0);
  }
  size_t elements_before(int layer) const {
    size_t elements = 0;
    for (int before = 0; before < layer; ++before) elements += layer_elements(before);
    return elements;
  }
  size_t bias_elements_of_layer() const { return static_cast<size_t>(biases() * gates()) * hidden_width(); }
};

Rnn read_rnn(cudnnRNNDescriptor_t descriptor) {
  Rnn rnn;
  cudnnRNNAlgo_t algorithm;
  cudnnRNNInputMode_t input_mode;
  cudnnDataType_t math_precision;
  cudnnMathType_t math_type;
  cudnnDropoutDescriptor_t dropout;
  uint32_t flags;
  OOMDIAG_REAL(cudnnGetRNNDescriptor_v8)
  (descriptor, &algorithm, &rnn.mode, &rnn.bias, &rnn.direction, &input_mode, &rnn.type, &math_precision, &math_type,
   &rnn.input, &rnn.hidden, &rnn.projection, &rnn.layers, &dropout, &flags);
  return rnn;
}

/// One matrix of the weight space: `gate` counts the gates twice, for the input and the recurrent side, then comes the
/// projection.
struct Matrix {
  size_t offset = 0, rows = 0, columns = 0;
};

Matrix find_matrix(const Rnn& rnn, int layer, int gate) {
  const auto gates = static_cast<size_t>(rnn.gates());
  const auto index = static_cast<size_t>(gate);
  const size_t input_block = rnn.hidden_width() * rnn.input_width(layer);
  const size_t recurrent_block = rnn.hidden_width() * rnn.output_width();
  const size_t start = rnn.elements_before(layer);
  if (index < gates) return {start + index * input_block, rnn.hidden_width(), rnn.input_width(layer)};
  const size_t recurrent_start = start + gates * input_block;
  if (index < 2 * gates)
    return {recurrent_start + (index - gates) * recurrent_block, rnn.hidden_width(), rnn.output_width()};
  return {recurrent_start + gates * recurrent_block, rnn.output_width(), rnn.hidden_width()};
}

void describe_tensor(cudnnTensorDescriptor_t descriptor, cudnnDataType_t type, size_t rows, size_t columns) {
  const int dimensions[3] = {1, static_cast<int>(rows), static_cast<int>(columns)};
  const int strides[3] = {static_cast<int>(rows * columns), static_cast<int>(columns), 1};
  OOMDIAG_REAL(cudnnSetTensorNdDescriptor)(descriptor, type, 3, dimensions, strides);
}

struct Batch {
  size_t steps = 0, sequences = 0;
};

Batch read_batch(cudnnRNNDataDescriptor_t descriptor) {
  cudnnDataType_t type;
  cudnnRNNDataLayout_t layout;
  int steps = 0, batch = 0, width = 0;
  double padding = 0;  // wide enough for any type's fill value
  const auto read = OOMDIAG_REAL(cudnnGetRNNDataDescriptor);
  std::vector<int> lengths(1);
  read(descriptor, &type, &layout, &steps, &batch, &width, 0, lengths.data(), &padding);
  lengths.resize(static_cast<size_t>(batch > 0 ? batch : 1));
  read(descriptor, &type, &layout, &steps, &batch, &width, static_cast<int>(lengths.size()), lengths.data(), &padding);
  return {static_cast<size_t>(steps), static_cast<size_t>(batch)};
}

/// Kept for the backward pass, for each time step and sequence: the gates and the cell state of every layer (GRU: three more
/// states), and the outputs between layers.
size_t count_reserve_bytes(const Rnn& rnn, const Batch& batch) {
  constexpr size_t kHeaderBytes = 256;
  const auto layers = static_cast<size_t>(rnn.layers);
  const size_t states = rnn.mode == CUDNN_LSTM ? 5 : rnn.mode == CUDNN_GRU ? 6 : 1;
  const size_t state_bytes = batch.steps * batch.sequences * rnn.hidden_width() * rnn.element_bytes();
  return state_bytes * static_cast<size_t>(rnn.directions()) * (layers * states + layers - 1) + kHeaderBytes;
}

/// Six states of all time steps; for each layer a workspace of cuBLAS, a copy of its matrices and some states of one time step.
size_t count_workspace_bytes(const Rnn& rnn, const Batch& batch) {
  constexpr size_t kProductBytes = 8 << 20;
  constexpr size_t kHeaderBytes = 256;
  const size_t step_bytes = batch.sequences * rnn.hidden_width() * rnn.element_bytes();
  const auto layers = static_cast<size_t>(rnn.pseudo_layers());
  size_t bytes = layers * kProductBytes + 6 * batch.steps * step_bytes * static_cast<size_t>(rnn.directions());
  if (rnn.mode == CUDNN_LSTM) {
    bytes += rnn.elements_before(rnn.pseudo_layers()) * rnn.element_bytes() + (9 * layers + 2) * step_bytes;
  } else {
    bytes += rnn.layer_elements(0) * rnn.element_bytes() + (layers == 1 ? 5 : 9 * layers) * step_bytes;
  }
  return bytes + kHeaderBytes + batch.steps * sizeof(int32_t);
}

}  // namespace

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t, cudnnRNNDescriptor_t descriptor,
                                                             size_t* bytes) {
  const Rnn rnn = read_rnn(descriptor);
  const auto layers = static_cast<size_t>(rnn.pseudo_layers());
  *bytes = (rnn.elements_before(rnn.pseudo_layers()) + layers * rnn.bias_elements_of_layer()) * rnn.element_bytes();
  return CUDNN_STATUS_SUCCESS;
}

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnGetRNNWeightParams(cudnnHandle_t, cudnnRNNDescriptor_t descriptor, int32_t layer,
                                                          size_t, const void* weights, int32_t gate,
                                                          cudnnTensorDescriptor_t matrix_descriptor,
                                                          void** matrix_address,
                                                          cudnnTensorDescriptor_t bias_descriptor,
                                                          void** bias_address) {
  const Rnn rnn = read_rnn(descriptor);
  auto* base = static_cast<char*>(const_cast<void*>(weights));
  const bool is_projection = gate == 2 * rnn.gates();
  if (matrix_address) *matrix_address = nullptr;
  if (bias_address) *bias_address = nullptr;
  if (is_projection && !rnn.has_projection()) return CUDNN_STATUS_SUCCESS;
  if (matrix_address) {
    const Matrix matrix = find_matrix(rnn, layer, gate);
    describe_tensor(matrix_descriptor, rnn.type, matrix.rows, matrix.columns);
    *matrix_address = base + matrix.offset * rnn.element_bytes();
  }
  const bool has_bias = rnn.biases() && !is_projection && (rnn.biases() == 2 || gate < rnn.gates());
  if (bias_address && has_bias) {
    const size_t offset = rnn.elements_before(rnn.pseudo_layers()) +
                          static_cast<size_t>(layer) * rnn.bias_elements_of_layer() +
                          static_cast<size_t>(gate) * rnn.hidden_width();
    describe_tensor(bias_descriptor, rnn.type, rnn.hidden_width(), 1);
    *bias_address = base + offset * rnn.element_bytes();
  }
  return CUDNN_STATUS_SUCCESS;
}

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t, cudnnRNNDescriptor_t descriptor,
                                                            cudnnForwardMode_t mode, cudnnRNNDataDescriptor_t data,
                                                            size_t* workspace_bytes, size_t* reserve_bytes) {
  const Rnn rnn = read_rnn(descriptor);
  const Batch batch = read_batch(data);
  if (reserve_bytes) *reserve_bytes = mode == CUDNN_FWD_MODE_TRAINING ? count_reserve_bytes(rnn, batch) : 0;
  return oomdiag::give_estimate("cudnnGetRNNTempSpaceSizes", workspace_bytes, count_workspace_bytes(rnn, batch));
}
