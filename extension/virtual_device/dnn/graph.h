#pragma once

#include <cudnn.h>

#include "extension/virtual_device/dnn/amount.h"

namespace oomdiag {

Tensor read_tensor(cudnnTensorDescriptor_t descriptor);
Tensor read_filter(cudnnFilterDescriptor_t descriptor);

/// Owns a descriptor of the graph API, for the GPU of the thread (route.cpp).
class Descriptor {
 public:
  explicit Descriptor(cudnnBackendDescriptorType_t type) {
    if (cudnnBackendCreateDescriptor(type, &descriptor_)) descriptor_ = nullptr;
  }
  ~Descriptor() {
    if (descriptor_) cudnnBackendDestroyDescriptor(descriptor_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  template <typename Value>
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const Value& value) {
    return set(name, type, 1, &value);
  }
  Descriptor& set(cudnnBackendAttributeName_t name, const Sizes& sizes) {
    return set(name, CUDNN_TYPE_INT64, static_cast<int64_t>(sizes.size()), sizes.data());
  }
  Descriptor& set(cudnnBackendAttributeName_t name, const Descriptor& other) {
    return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &other.descriptor_);
  }
  /// Whether all that was set was accepted.
  bool finalize() { return is_good_ && descriptor_ && !cudnnBackendFinalize(descriptor_); }
  cudnnBackendDescriptor_t get() const { return descriptor_; }

 private:
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count,
                  const void* values) {
    is_good_ = is_good_ && descriptor_ && !cudnnBackendSetAttribute(descriptor_, name, type, count, values);
    return *this;
  }

  cudnnBackendDescriptor_t descriptor_ = nullptr;
  bool is_good_ = true;
};

/// Finalizes the description of a tensor, or of a convolution that the old API describes. False if it is rejected.
bool describe(Descriptor& descriptor, const Tensor& tensor, int64_t id);
bool describe(Descriptor& descriptor, cudnnConvolutionDescriptor_t convolution);

/// The workspace of the first plan that cuDNN's heuristics give for `graph` and that can be made; 0 if there is none.
int64_t find_workspace(const Descriptor& graph);

}  // namespace oomdiag
