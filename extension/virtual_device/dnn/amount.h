#pragma once

#include <cudnn.h>

#include <cstdint>
#include <vector>

namespace oomdiag {

using Sizes = std::vector<int64_t>;

/// A tensor as the old API describes it: a filter has a layout in place of strides.
struct Tensor {
  cudnnDataType_t type{};
  Sizes sizes{}, strides{};
};

/// What a piece of work moves and computes; how long it takes follows from it (driver/clock.h).
struct Amount {
  double memory_bytes = 0;
  double flops = 0;  ///< in 32 bits

  Amount& operator+=(const Amount& other) {
    memory_bytes += other.memory_bytes;
    flops += other.flops;
    return *this;
  }
};

/// All of a tensor's bytes, once.
Amount count_bytes(const Tensor& tensor);

/// Of a convolution, whichever of the three is computed: each element of `output` sums over the filters of its channel.
double count_convolution_flops(const Tensor& filter, const Tensor& output);

/// Of `result` [.., m, n], a product whose first factor is [.., m, k].
double count_product_flops(const Tensor& first, const Tensor& result);

/// Of attention forward: two products, each of `query` with all rows of `key`, [batch, heads, rows, columns] both.
double count_attention_flops(const Tensor& key, const Tensor& query);

}  // namespace oomdiag
