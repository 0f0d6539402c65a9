#pragma once

#include <ATen/ATen.h>

#include <optional>

namespace oomdiag {

/// The bytes from a tensor's first element to its last.
struct Span {
  void* begin = nullptr;
  size_t bytes = 0;
};

Span span_of(const at::Tensor& tensor);

/// Whether it lies on a GPU, with nothing between it and its numbers.
bool is_on_gpu(const at::Tensor& tensor);
bool is_known(const at::Tensor& tensor);

/// Integers and truth values, which may be guessed at.
bool is_whole_number(const at::Tensor& tensor);

/// A tensor of the CPU with the same sizes, strides and contents, zeros for what is not known.
at::Tensor mirror(const at::Tensor& tensor);

/// The same where all its numbers are one, or none is known: each dimension is 1 long. Null where they differ.
struct UniformValue {
  at::Tensor number{};
  bool is_known = false;
  bool is_dropped = false;  ///< the host wrote numbers that were not kept
};
std::optional<UniformValue> find_uniform_value(const at::Tensor& tensor);

/// A tensor of zeros, each of `like`'s dimensions 1 long.
at::Tensor one_number(const at::Tensor& like);

/// What is written there follows from nothing that is known.
void forget(const at::Tensor& tensor);

/// The same whenever the graph runs that is being captured.
void forget_at_replay(const at::Tensor& tensor);

}  // namespace oomdiag
