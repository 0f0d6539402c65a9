#include "profiler/cost/operator_work.h"
#include "profiler/error.h"
#include "tests/catch.h"

using namespace oomdiag;

namespace {

Work work_of_line(const std::string& values, const std::string& name, int64_t count = 1) {
  return work_of(parse_metered_operator("2\tforward\t" + name + "\t" + std::to_string(count) + "\t" + values));
}

}  // namespace

TEST_CASE("a matrix product has two operations for each meeting of elements", "[cost]") {
  const Work mm = work_of_line("Half:2:64x32 Half:2:32x10 > Half:2:64x10", "aten::mm", 3);
  CHECK(mm.flops[static_cast<size_t>(WorkPrecision::fp16)] == 3 * 2 * 64 * 32 * 10);
  CHECK(mm.all_flops() == 3 * 2 * 64 * 32 * 10);
  CHECK(mm.memory_bytes == 3 * 2 * (64 * 32 + 32 * 10 + 64 * 10));
  CHECK(mm.launches == 3);
  CHECK(work_of_line("Float:4:10 Float:4:64x32 Float:4:32x10 i:1 i:1 > Float:4:64x10", "aten::addmm").all_flops() ==
        40960);
  CHECK(work_of_line("Float:4:5x64x32 Float:4:5x32x10 > Float:4:5x64x10", "aten::bmm").all_flops() == 5 * 40960);
}

TEST_CASE("a convolution in groups has only the products within its groups", "[cost]") {
  const std::string rest = " - - - - i:0 - i:32 > Float:4:8x32x14x14";
  const Work depthwise = work_of_line("Float:4:8x32x14x14 Float:4:32x1x3x3" + rest, "aten::convolution");
  CHECK(depthwise.all_flops() == int64_t{2} * 8 * 14 * 14 * 32 * 9);
  const Work dense = work_of_line("Float:4:8x32x14x14 Float:4:32x32x3x3" + rest, "aten::convolution");
  CHECK(dense.all_flops() == 32 * depthwise.all_flops());
}

TEST_CASE("a transposed convolution moves over its input", "[cost]") {
  const Work work =
      work_of_line("Float:4:8x32x7x7 Float:4:32x16x2x2 - - - - i:1 - i:1 > Float:4:8x16x14x14", "aten::convolution");
  CHECK(work.all_flops() == int64_t{2} * 8 * 7 * 7 * 32 * 16 * 4);
}

TEST_CASE("a convolution's backward has a pass for each gradient that is wanted", "[cost]") {
  const std::string tensors = "Float:4:8x32x14x14 Float:4:8x3x14x14 Float:4:32x3x3x3 - - - - i:0 - i:1 ";
  const int64_t pass = int64_t{2} * 8 * 14 * 14 * 32 * 3 * 9;
  CHECK(work_of_line(tensors + "m:110 > Float:4:1", "aten::convolution_backward").all_flops() == 2 * pass);
  CHECK(work_of_line(tensors + "m:010 > Float:4:1", "aten::convolution_backward").all_flops() == pass);
}

TEST_CASE("fused attention has two products, and five in its backward", "[cost]") {
  const std::string qkv = "BFloat16:2:2x4x128x64 BFloat16:2:2x4x128x64 BFloat16:2:2x4x128x64 ";
  const int64_t product = int64_t{2} * 2 * 4 * 128 * 128 * 64;
  CHECK(work_of_line(qkv + "> -", "aten::_scaled_dot_product_flash_attention").all_flops() == 2 * product);
  CHECK(work_of_line("BFloat16:2:2x4x128x64 " + qkv + "> -", "aten::_scaled_dot_product_flash_attention_backward")
            .all_flops() == 5 * product);
}

TEST_CASE("what has no rule is counted by its bytes, and what should have one as not metered", "[cost]") {
  const Work relu = work_of_line("Float:4:100 > Float:4:100", "aten::relu");
  CHECK(relu.all_flops() == 0);
  CHECK(relu.memory_bytes == 800);
  CHECK(relu.not_metered == 0);
  CHECK(work_of_line("- > Float:4:100", "aten::_cudnn_rnn", 2).not_metered == 2);
  CHECK(work_of_line("- > Float:4:100", "aten::empty").launches == 0);
}

TEST_CASE("the work of a step is that of its operators", "[cost]") {
  std::vector<MeteredOperator> list;
  for (const char* step : {"1", "2", "2"}) {
    list.push_back(parse_metered_operator(std::string(step) + "\tforward\taten::relu\t1\tFloat:4:5 > Float:4:5"));
  }
  CHECK(work_of_step(list, 2).memory_bytes == 80);
  CHECK(work_of_step(list, 3).launches == 0);
}

TEST_CASE("a line that is not of a meter's file is refused", "[cost]") {
  CHECK_THROWS_AS(parse_metered_operator("1\tforward\taten::mm\t1"), Error);
  CHECK_THROWS_AS(parse_metered_operator("one\tforward\taten::mm\t1\t- > -"), Error);
  CHECK_THROWS_AS(parse_metered_operator("1\tforward\taten::mm\t1\tFloat > -"), Error);
}
