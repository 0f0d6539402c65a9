// Prints which plans cuDNN lists for convolutions, best first, and what workspace each wants:
//
//   plans < CONVOLUTIONS
//
// A line of input is "direction dtype batch channels size out_channels window stride padding groups" (tests/truth/h200_plans.csv has such
// columns), a line of output that and "place engine knobs workspace_bytes", separated by commas. By cuDNN's documented backend interface; on a
// virtual device as on a real GPU. Built by test_plans.py.
#include <cudnn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int64_t kPlans = 6;  ///< of each convolution, at most

struct Problem {
  std::string direction, dtype;
  int64_t batch, channels, size, out_channels, window, stride, padding, groups;

  int64_t out_size() const { return (size + 2 * padding - window) / stride + 1; }
};

void check(cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  std::fprintf(stderr, "plans: %s: %s\n", what, cudnnGetErrorString(status));
  std::exit(1);
}

/// A descriptor of cuDNN's backend. All live until the end of the program.
class Descriptor {
 public:
  explicit Descriptor(cudnnBackendDescriptorType_t type) {
    check(cudnnBackendCreateDescriptor(type, &descriptor_), "create a descriptor");
  }

  template <typename T>
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const std::vector<T>& values) {
    check(cudnnBackendSetAttribute(descriptor_, name, type, static_cast<int64_t>(values.size()), values.data()), "set");
    return *this;
  }
  Descriptor& set(cudnnBackendAttributeName_t name, const Descriptor& value) {
    return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, std::vector{value.descriptor_});
  }
  Descriptor& finish() {
    check(cudnnBackendFinalize(descriptor_), "finish a descriptor");
    return *this;
  }
  bool try_to_finish() { return cudnnBackendFinalize(descriptor_) == CUDNN_STATUS_SUCCESS; }

  template <typename T>
  T get(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type) const {
    T value{};
    int64_t count = 0;
    check(cudnnBackendGetAttribute(descriptor_, name, type, 1, &count, &value), "get");
    return value;
  }
  /// Up to `most` descriptors of one type.
  std::vector<Descriptor> get(cudnnBackendAttributeName_t name, cudnnBackendDescriptorType_t type, int64_t most) const {
    std::vector<Descriptor> all;
    std::vector<cudnnBackendDescriptor_t> raw;
    for (int64_t i = 0; i < most; ++i) raw.push_back(all.emplace_back(type).descriptor_);
    int64_t count = 0;
    check(cudnnBackendGetAttribute(descriptor_, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, most, &count, raw.data()), "get");
    all.erase(all.begin() + std::min(count, most), all.end());
    return all;
  }

 private:
  cudnnBackendDescriptor_t descriptor_ = nullptr;
};

using Numbers = std::vector<int64_t>;

Descriptor tensor(int64_t id, cudnnDataType_t dtype, const Numbers& shape) {
  Numbers strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * shape[i];
  Descriptor made(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  made.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, std::vector{dtype})
      .set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, shape)
      .set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, strides)
      .set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, Numbers{id})
      .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, Numbers{16});
  return made.finish();
}

Descriptor convolution(const Problem& problem) {
  const Numbers padding{problem.padding, problem.padding}, stride{problem.stride, problem.stride};
  Descriptor made(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  made.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, Numbers{2})
      .set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, std::vector{CUDNN_DATA_FLOAT})
      .set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, std::vector{CUDNN_CROSS_CORRELATION})
      .set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, padding)
      .set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, padding)
      .set(CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, Numbers{1, 1})
      .set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, stride);
  return made.finish();
}

/// The names that one direction has for its attributes.
struct Direction {
  const char* name;
  cudnnBackendDescriptorType_t type;
  cudnnBackendAttributeName_t x, y, w, convolution, alpha, beta;
};
constexpr Direction kDirections[] = {
    {"forward", CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA},
    {"input_gradient", CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA},
    {"weight_gradient", CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA},
};

Descriptor operation(const Problem& problem) {
  const auto* const direction = std::find_if(std::begin(kDirections), std::end(kDirections),
                                             [&](const Direction& one) { return problem.direction == one.name; });
  if (direction == std::end(kDirections)) check(CUDNN_STATUS_BAD_PARAM, "read a direction");
  const cudnnDataType_t dtype = problem.dtype == "float32"   ? CUDNN_DATA_FLOAT
                                : problem.dtype == "float16" ? CUDNN_DATA_HALF
                                                             : CUDNN_DATA_BFLOAT16;
  const Descriptor x = tensor('x', dtype, {problem.batch, problem.channels, problem.size, problem.size});
  const Descriptor y =
      tensor('y', dtype, {problem.batch, problem.out_channels, problem.out_size(), problem.out_size()});
  const Descriptor w =
      tensor('w', dtype, {problem.out_channels, problem.channels / problem.groups, problem.window, problem.window});
  Descriptor made(direction->type);
  made.set(direction->x, x).set(direction->y, y).set(direction->w, w).set(direction->convolution, convolution(problem));
  made.set(direction->alpha, CUDNN_TYPE_FLOAT, std::vector{1.0F});
  made.set(direction->beta, CUDNN_TYPE_FLOAT, std::vector{0.0F});
  return made.finish();
}

std::string knobs_of(const Descriptor& plan) {
  std::string text;
  for (const Descriptor& knob : plan.get(CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR, 32)) {
    const auto type = knob.get<cudnnBackendKnobType_t>(CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE);
    const auto value = knob.get<int64_t>(CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64);
    text += (text.empty() ? "" : " ") + std::to_string(static_cast<int>(type)) + '=' + std::to_string(value);
  }
  return text;
}

void print_plans(const std::string& line, const Problem& problem, cudnnHandle_t handle) {
  Descriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR), heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, operation(problem));
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, std::vector{handle}).finish();
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, std::vector{CUDNN_HEUR_MODE_INSTANT}).finish();
  int place = 0;
  for (const Descriptor& choice :
       heuristic.get(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, kPlans)) {
    const Descriptor engine = choice.get(CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_BACKEND_ENGINE_DESCRIPTOR, 1).front();
    Descriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, std::vector{handle});
    plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, choice);
    std::string bytes;
    if (plan.try_to_finish())
      bytes = std::to_string(plan.get<int64_t>(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64));
    std::cout << line << ',' << place++ << ',' << engine.get<int64_t>(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64)
              << ',' << knobs_of(choice) << ',' << bytes << std::endl;
  }
}

}  // namespace

int main() {
  cudnnHandle_t handle = nullptr;
  check(cudnnCreate(&handle), "make a handle");
  std::string line;
  while (std::getline(std::cin, line)) {
    Problem problem;
    std::string words = line;
    std::replace(words.begin(), words.end(), ',', ' ');
    std::istringstream(words) >> problem.direction >> problem.dtype >> problem.batch >> problem.channels >>
        problem.size >> problem.out_channels >> problem.window >> problem.stride >> problem.padding >> problem.groups;
    print_plans(line, problem, handle);
  }
}
