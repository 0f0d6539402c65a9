#pragma once

#include <cudnn.h>

#include <optional>
#include <span>
#include <unordered_map>

#include "extension/virtual_device/dnn/amount.h"
#include "extension/virtual_device/dnn/shared_tiles.h"
#include "extension/virtual_device/driver/locks.h"

namespace oomdiag {

/// What the program wrote into the descriptors of the graph API, as far as it says how long a plan takes. Amounts go the
/// way of the descriptors: tensors → operation → graph → engine or heuristics → configuration → plan. From any thread.
class Descriptors {
 public:
  void add(cudnnBackendDescriptor_t descriptor, cudnnBackendDescriptorType_t type);
  void remove(cudnnBackendDescriptor_t descriptor);
  /// That it was made with; CUDNN_BACKEND_TENSOR_DESCRIPTOR where that is not known, of which nothing is special.
  cudnnBackendDescriptorType_t type(cudnnBackendDescriptor_t descriptor) const;

  /// cudnnBackendSetAttribute, of any attribute.
  void set(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t attribute, cudnnBackendAttributeType_t type,
           int64_t count, const void* elements);
  /// What heuristics found is as much work as what they were asked for.
  void pass_on(cudnnBackendDescriptor_t from, std::span<const cudnnBackendDescriptor_t> found);

  Amount amount(cudnnBackendDescriptor_t descriptor) const;
  /// Of what computes one convolution without groups, or one of its gradients, and nothing else.
  std::optional<ConvolutionProduct> product(cudnnBackendDescriptor_t descriptor) const;
  /// Whether another plan than `plan` has run on these tensors before: somebody compares plans by their time.
  bool is_comparison(cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t tensors);

 private:
  struct Entry {
    cudnnBackendDescriptorType_t type{};
    Tensor tensor{};            ///< of a tensor
    bool is_in_memory = true;   ///< a tensor that is neither passed on in registers nor given by value
    Tensor factor{}, result{};  ///< of an operation: the two that say how much it computes
    Tensor image{};             ///< of a convolution: its input, or the gradient of that
    Amount amount{};            ///< of the parts that were set so far
    std::optional<ConvolutionProduct> product{};
    cudnnBackendDescriptor_t first_plan = nullptr;  ///< of a pack of tensors: the plan that ran on it first
  };

  static void set_in_tensor(Entry& tensor, cudnnBackendAttributeName_t attribute, int64_t count, const void* elements);
  static void add_part(Entry& whole, cudnnBackendAttributeName_t attribute, const Entry& part);
  static Amount total(const Entry& entry);
  static std::optional<ConvolutionProduct> product_of(const Entry& entry);

  mutable LibraryLock lock_;
  std::unordered_map<cudnnBackendDescriptor_t, Entry> entries_;
};

}  // namespace oomdiag
