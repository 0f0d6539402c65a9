#include "profiler/cost/products.h"
#include "profiler/error.h"
#include "tests/catch.h"

using namespace oomdiag;

namespace {

MeteredOperator call(const std::string& name, const std::string& values) {
  return parse_metered_operator("2\tforward\t0\taten::" + name + "\t1\t" + values);
}

/// -1 where it is not known.
int64_t flops(const std::string& name, const std::string& values) {
  const auto products = products_of(call(name, values));
  if (!products) return -1;
  int64_t sum = 0;
  for (const MatrixProduct& product : *products) sum += product.flops();
  return sum;
}

}  // namespace

TEST_CASE("a matrix product has two operations for each pair of elements", "[cost]") {
  CHECK(flops("mm", "Half:2:64x32 Half:2:32x10 > Half:2:64x10") == 2 * 64 * 32 * 10);
  CHECK(flops("addmm", "Float:4:10 Float:4:64x32 Float:4:32x10 i:1 i:1 > Float:4:64x10") == 2 * 64 * 32 * 10);
  CHECK(flops("bmm", "Float:4:5x64x32 Float:4:5x32x10 > Float:4:5x64x10") == 5 * 2 * 64 * 32 * 10);
  CHECK(flops("mv", "Float:4:64x32 Float:4:32 > Float:4:64") == 2 * 64 * 32);
  CHECK(flops("dot", "Float:4:32 Float:4:32 > Float:4:") == 2 * 32);
}

TEST_CASE("rows of a grouped product multiply the matrix of their group only", "[cost]") {
  const int64_t once = int64_t{2} * 8192 * 1024 * 2048;
  CHECK(flops("_grouped_mm", "Half:2:8192x1024 Half:2:8x1024x2048 Int:4:8 - - > Half:2:8192x2048") == once);
  CHECK(flops("_grouped_mm", "Half:2:1024x8192 Half:2:8192x2048 Int:4:8 - - > Half:2:8x1024x2048") == once);
  CHECK(flops("_grouped_mm", "Half:2:64x32 Half:2:32x10 - - - > Half:2:64x10") == -1);
}

TEST_CASE("a convolution in groups has only the products within its groups", "[cost]") {
  const std::string rest = " - - - - i:0 - i:32 > Float:4:8x32x14x14";
  CHECK(products_of(call("convolution", "Float:4:8x32x14x14 Float:4:32x1x3x3" + rest)) ==
        std::vector<MatrixProduct>{{.batch = 32, .m = 8 * 14 * 14, .n = 1, .k = 9, .window = 9}});
  const std::string dense = " - - - - i:0 - i:1 > Float:4:8x32x14x14";
  CHECK(flops("convolution", "Float:4:8x32x14x14 Float:4:32x32x3x3" + dense) == int64_t{2} * 8 * 14 * 14 * 32 * 32 * 9);
}

TEST_CASE("a transposed convolution moves over its input", "[cost]") {
  CHECK(flops("convolution", "Float:4:8x32x7x7 Float:4:32x16x2x2 - - - - i:1 - i:1 > Float:4:8x16x14x14") ==
        int64_t{2} * 8 * 7 * 7 * 32 * 16 * 4);
}

TEST_CASE("a convolution's backward has a pass for each gradient that is requested", "[cost]") {
  const std::string tensors = "Float:4:8x32x14x14 Float:4:8x3x14x14 Float:4:32x3x3x3 - - - - i:0 - i:1 ";
  const int64_t pass = int64_t{2} * 8 * 14 * 14 * 32 * 3 * 9;
  CHECK(flops("convolution_backward", tensors + "m:110 > Float:4:1") == 2 * pass);
  CHECK(flops("convolution_backward", tensors + "m:010 > Float:4:1") == pass);
}

TEST_CASE("fused attention has two products, and five in its backward", "[cost]") {
  const std::string qkv = "BFloat16:2:2x4x128x64 BFloat16:2:2x4x128x64 BFloat16:2:2x4x128x64 ";
  const int64_t product = int64_t{2} * 2 * 4 * 128 * 128 * 64;
  CHECK(flops("_scaled_dot_product_flash_attention", qkv + "> -") == 2 * product);
  CHECK(flops("_scaled_dot_product_flash_attention_backward", "BFloat16:2:2x4x128x64 " + qkv + "> -") == 5 * product);
}

TEST_CASE("a recurrent network multiplies its inputs at once and its state step by step", "[cost]") {
  const int64_t inputs = 4 * 512 * 256 + 4 * 512 * 512,
                states = 2 * 4 * 512 * 512;  // elements of the matrices of two layers
  const std::string list = "list:Half:8:1:" + std::to_string(inputs + states) + " ";
  const std::string state = "Half:2:2x64x512 ";
  const std::string lstm = "i:2 i:512 i:0 i:2 i:1 - i:1 i:0 - - > Half:2:64x100x512";
  const auto forward = products_of(call("_cudnn_rnn", "Half:2:64x100x256 " + list + "i:4 - " + state + state + lstm));
  CHECK(forward == std::vector<MatrixProduct>{{.m = 6400, .n = 2048, .k = 256 + 512},
                                              {.m = 64, .n = 2048, .k = 512, .steps = 200}});
  CHECK(flops("_cudnn_rnn", "Half:2:64x100x256 " + list + "i:4 - " + state + state + lstm) ==
        2 * 6400 * (inputs + states));
  CHECK(flops("_cudnn_rnn_backward", "Half:2:64x100x256 " + list + "i:4 - " + state + state + "- - - - " + lstm) ==
        4 * 6400 * (inputs + states));
}

TEST_CASE("what computes no products has none, and what computes unknown ones is not metered", "[cost]") {
  CHECK(flops("relu_", "Float:4:100 > Float:4:100") == 0);
  CHECK(flops("gelu_backward", "Float:4:100 Float:4:100 > Float:4:100") == 0);
  CHECK(flops("linalg_svd", "Float:4:10x10 > Float:4:10x10") == -1);
  CHECK(flops("mm", "Float:4:100 > Float:4:100") == -1);
}

TEST_CASE("a line that is not of a meter's file is rejected", "[cost]") {
  CHECK_THROWS_AS(parse_metered_operator("1\tforward\t0\taten::mm\t1"), Error);
  CHECK_THROWS_AS(parse_metered_operator("one\tforward\t0\taten::mm\t1\t- > -"), Error);
  CHECK_THROWS_AS(parse_metered_operator("1\tforward\t0\taten::mm\t1\tFloat > -"), Error);
  CHECK_THROWS_AS(parse_metered_run("no meter's file"), Error);
}
