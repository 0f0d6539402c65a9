#include <fmt/format.h>

#include <cmath>

#include "profiler/cost/operator_work.h"
#include "profiler/cost/step_work.h"
#include "tests/catch.h"

using namespace oomdiag;

namespace {

DeviceRates fast_device() {
  DeviceRates rates{.tf32_flops = 4'000'000'000'000,
                    .memory_bytes = 1'000'000'000'000,
                    .bus_bytes = 10'000'000'000,
                    .multiprocessors = 100};
  rates.flops[static_cast<size_t>(WorkPrecision::fp32)] = 1'000'000'000'000;
  return rates;
}

OperatorWork work(const std::string& name, const std::string& values) {
  return work_of(parse_metered_operator("1\tforward\t0\taten::" + name + "\t1\t" + values));
}

constexpr const char* kRun =
    "steps\t2\n"
    "1\tforward\t3\taten::relu\t1\tFloat:4:10 > Float:4:10\n"
    "2\tforward\t3\taten::relu\t2\tFloat:4:100 > Float:4:100\n"
    "2\tbackward\t3\taten::mm\t1\tFloat:4:8x8 Float:4:8x8 > Float:4:8x8\n"
    "2\tsetup\t0\taten::mm\t1\tFloat:4:8x8 Float:4:8x8 > Float:4:8x8\n"
    "3\tforward\t3\taten::relu\t1\tFloat:4:10 > Float:4:10\n";

}  // namespace

TEST_CASE("bytes are those of inputs and outputs, but for what is only written and what is read in part", "[cost]") {
  CHECK(work("relu", "Float:4:100 > Float:4:100").memory_bytes == 800);
  CHECK(work("copy_", "Half:2:100 Float:4:100 i:0 > Half:2:100").memory_bytes == 600);
  CHECK(work("embedding", "Float:4:50000x16 Long:8:10 i:-1 > Float:4:10x16").memory_bytes == 2 * 640 + 80);
  CHECK(work("_foreach_add_", "list:Float:60:1000:0 list:Float:60:1000:0 - >").memory_bytes == 3000);
  CHECK(work("_fused_adam_", "list:Float:60:100:0 list:Float:60:100:0 list:Float:60:100:0 list:Float:60:100:0 >")
            .memory_bytes == 700);
  CHECK(work("_foreach_add_", "list:Float:60:1000:0 list:Float:60:1000:0 - >").launches == 2);
}

TEST_CASE("a kernel that no operator launches takes what it reads and writes, and may do more than is known",
          "[cost]") {
  const auto kernel = [](const std::string& values) {
    return work_of(parse_metered_operator("1\tbackward\t0\tkernel::triton_poi_fused_relu_backward_0\t1\t" + values));
  };
  const OperatorWork known = kernel("Byte:1:1000 i:1 > Byte:1:500");
  CHECK(known.kind == WorkKind::fused);
  CHECK(known.memory_bytes == 1500);
  CHECK(known.flops() == 0);
  CHECK(known.is_metered);
  CHECK(family_of(known, fast_device()) == KernelFamily::fused);
  CHECK(modelled_time(known, fast_device()).has_value());
  CHECK_FALSE(kernel("Byte:1:1000 i:0 > Byte:1:500").is_metered);
}

TEST_CASE("a copy from the host goes over the bus", "[cost]") {
  const OperatorWork copy = work("copy_", "Float:4:100 Float:4:100@host i:0 > Float:4:100");
  CHECK(copy.bus_bytes == 400);
  CHECK(work("copy_", "Float:4:100 Float:4:100 i:0 > Float:4:100").bus_bytes == 0);
}

TEST_CASE("copies on a stream of their own run beside what their phase computes", "[cost]") {
  const DeviceRates rates = fast_device();
  const auto step_with = [&](const std::string& copies) {
    const std::string run =
        "steps\t1\n1\tforward\t3\taten::mm\t1\tFloat:4:8192x8192 Float:4:8192x8192 > Float:4:8192x8192\n" + copies;
    return work_of_last_step(parse_metered_run(run), &rates, true);
  };
  constexpr const char* kCopies = "\t10\tFloat:4:1000000@host Float:4:1000000 i:1 > Float:4:1000000@host\n";
  const auto plain = step_with(""), waited = step_with(std::string("1\tforward\t3\taten::copy_") + kCopies);
  const auto beside = step_with(std::string("1\tforward\t3\taten::copy_@stream") + kCopies);
  REQUIRE((plain && waited && beside));
  CHECK(beside->all.bus_bytes == waited->all.bus_bytes);
  const double copies_ns = waited->gpu_ns() - plain->gpu_ns();
  CHECK(copies_ns > 0);
  CHECK(beside->all.overlapped == 10);
  CHECK(beside->gpu_ns() == Approx(plain->gpu_ns() + copies_ns / 10));  // one of them is hidden by nothing
  const auto alone =
      step_with(std::string("1\tbackward\t3\taten::copy_@stream") + kCopies);  // nothing is computed there
  CHECK(alone->gpu_ns() == Approx(waited->gpu_ns()));
}

TEST_CASE("a product whose last wave is not full takes as long as one that fills it", "[cost]") {
  const DeviceRates device = fast_device();
  OperatorWork full{.kind = WorkKind::matrix_product,
                    .precision = WorkPrecision::fp32,
                    .products = {{.m = 25600, .n = 128, .k = 512}}};
  OperatorWork more = full;
  more.products[0].m = 25600 + 256;
  CHECK(peak_time(full, device)->compute_ns < 1.01 * 1e-3 * static_cast<double>(full.flops()));
  CHECK(peak_time(more, device)->compute_ns > 1.2 * peak_time(full, device)->compute_ns);
  full.products[0].k = more.products[0].k = 8192;  // the inner dimension is cut into parts
  CHECK(peak_time(more, device)->compute_ns < 1.2 * peak_time(full, device)->compute_ns);
}

TEST_CASE("on Hopper a convolution of few channels takes as long as one whose channels fill lines of 128 bytes",
          "[cost]") {
  DeviceRates device = fast_device();
  const auto compute_ns = [&](const std::string& channels, const std::string& window) {
    const std::string tensors = "Float:4:8x" + channels + "x14x14 Float:4:32x" + channels + "x" + window;
    return peak_time(work("convolution", tensors + " - - - - i:0 - i:1 > Float:4:8x32x14x14"), device)->compute_ns;
  };
  CHECK(compute_ns("3", "3x3") < compute_ns("32", "3x3"));
  device.capability_major = 9;
  CHECK(compute_ns("3", "3x3") == compute_ns("32", "3x3"));
  CHECK(compute_ns("3", "1x1") < compute_ns("64", "1x1"));
}

TEST_CASE("convolutions of float32 run in TF32, products do not", "[cost]") {
  const DeviceRates device = fast_device();
  OperatorWork product{.kind = WorkKind::matrix_product,
                       .precision = WorkPrecision::fp32,
                       .products = {{.m = 4096, .n = 4096, .k = 4096}}};
  OperatorWork convolution = product;
  convolution.kind = WorkKind::convolution;
  CHECK(peak_time(product, device)->compute_ns == 4 * peak_time(convolution, device)->compute_ns);
}

TEST_CASE("a product with a vector has no tiles", "[cost]") {
  const DeviceRates device = fast_device();
  const OperatorWork dot = work("bmm", "Float:4:1x1x1000000 Float:4:1x1000000x2 > Float:4:1x1x2");
  CHECK(peak_time(dot, device)->compute_ns == 1e-3 * static_cast<double>(dot.flops()));
}

TEST_CASE("a recurrent network takes a kernel at least for each step of each layer", "[cost]") {
  const std::string state = "Float:4:2x64x512 Float:4:2x64x512 ";
  const OperatorWork lstm = work("_cudnn_rnn", "Float:4:64x100x512 list:Float:8:1:4194304 i:4 - " + state +
                                                   "i:2 i:512 i:0 i:2 i:1 - i:1 i:0 - - > Float:4:64x100x512");
  CHECK(lstm.launches == 201);  // the inputs of all steps are one product
  CHECK(peak_time(lstm, fast_device())->compute_ns > 0.25e-3 * static_cast<double>(lstm.flops()));
}

TEST_CASE("the gradient of an embedding fills its table, and adds each element of the rows that were taken", "[cost]") {
  const OperatorWork gradient =
      work("embedding_dense_backward", "Float:4:8x100x64 Long:8:8x100 i:5000 i:-1 i:0 > Float:4:5000x64");
  CHECK(gradient.turns == 8 * 100 * 64);
  CHECK(gradient.memory_bytes == 4 * (8 * 100 * 64 + 5000 * 64) + 8 * 800);
  CHECK(gradient.launches > 1);
  CHECK(family_of(gradient, fast_device()) == KernelFamily::embedding_gradient);
}

TEST_CASE("the loss of labels writes its gradient once, and takes rows in one thread block", "[cost]") {
  const OperatorWork loss =
      work("nll_loss_backward", "Float:4: Float:4:800x1000 Long:8:800 - i:1 i:-100 Float:4: > Float:4:800x1000");
  CHECK(loss.memory_bytes == 800 * 1000 * 4);
  CHECK(loss.serial_blocks->elements == 800);
  CHECK(family_of(loss, fast_device()) == KernelFamily::label_loss);
}

TEST_CASE("a matrix is factorized column by column", "[cost]") {
  CHECK(work("_linalg_solve_ex", "Float:4:256x256 Float:4:256x256 i:0 i:0 > Float:4:256x256").launches == 256);
  CHECK(work("_linalg_svd", "Float:4:32x32 i:0 i:1 - > Float:4:32x32 Float:4:32").launches == 4 * 32);
  CHECK(work("linalg_vector_norm", "Float:4:32x32 i:2 - i:0 - > Float:4:").launches == 1);
}

TEST_CASE("a depthwise convolution is cuDNN's or PyTorch's as PyTorch chooses", "[cost]") {
  const auto kernel = [](const std::string& input, const std::string& window, const std::string& output) {
    return work("convolution", input + " " + window + " - - - - i:0 - i:64 > " + output).depthwise;
  };
  using enum DepthwiseKernel;
  CHECK(kernel("Half:2:8x64x28x28", "Half:2:64x1x3x3", "Half:2:8x64x28x28") == cudnn);
  CHECK(kernel("Half:2:8x64x28x28", "Half:2:64x1x9x9", "Half:2:8x64x28x28") == pytorch);
  CHECK(kernel("Half:2:8x64x28x28", "Half:2:64x1x3x3", "Half:2:8x64x14x14") ==
        pytorch);  // few channels for a stride of two
  CHECK(kernel("Float:4:8x64x28x28", "Float:4:64x1x3x3", "Float:4:8x64x28x28") == pytorch);
  CHECK(kernel("Float:4:8x64x28x28~", "Float:4:64x1x7x7", "Float:4:8x64x28x28~") == cudnn_channels_last);
}

TEST_CASE("a batch norm of few channels takes as long as one that gives each multiprocessor two", "[cost]") {
  const DeviceRates device = fast_device();
  const auto turns_ns = [&](const std::string& name, const std::string& shape, const std::string& is_training) {
    const std::string tensor = "Half:2:" + shape;
    return peak_time(work(name, tensor + " - - - - i:" + is_training + " > " + tensor), device)->turns_ns;
  };
  CHECK(turns_ns("native_batch_norm", "8x64x100x10", "1") == 8000);
  CHECK(turns_ns("native_batch_norm", "8x200x100x10", "1") == 8000);
  CHECK(turns_ns("native_batch_norm", "8x201x100x10", "1") == 16000);
  CHECK(turns_ns("native_batch_norm", "8x64x100x10", "0") == 0);
}

TEST_CASE("interpolation takes all images and channels in turn, however few places the output has", "[cost]") {
  const DeviceRates device = fast_device();
  const auto turns_ns = [&](const std::string& name, const std::string& input, const std::string& output) {
    return peak_time(work(name, "Half:2:" + input + " > Half:2:" + output), device)->turns_ns;
  };
  CHECK(turns_ns("upsample_bilinear2d", "8x64x7x7", "8x64x14x14") == 512);
  CHECK(turns_ns("upsample_bilinear2d", "8x64x128x128", "8x64x256x512") == 512);
  CHECK(turns_ns("upsample_bilinear2d", "8x64x512x512", "8x64x1024x1024") == 6 * 512);
  CHECK(turns_ns("upsample_bilinear2d_backward", "8x64x14x14", "8x64x7x7") == 0);
  CHECK(turns_ns("upsample_nearest2d", "8x64x7x7", "8x64x14x14") == 0);
}

TEST_CASE("kernels of batch norms, of float32 attention and of Hopper are distinguished", "[cost]") {
  DeviceRates device = fast_device();
  const auto family = [&](const std::string& name, const std::string& values) {
    return family_of(work(name, values), device);
  };
  const std::string image = "Half:2:8x64x10x10 ", product = "Half:2:64x64 Half:2:64x64 > Half:2:64x64";
  CHECK(family("cudnn_batch_norm", image + "> " + image) == KernelFamily::cudnn_batch_norm);
  CHECK(family("native_batch_norm_backward", image + image + "i:1 > " + image) == KernelFamily::batch_norm_backward);
  const std::string query = "Float:4:2x4x128x64 ";
  CHECK(family("_scaled_dot_product_efficient_attention", query + query + query + "> " + query) ==
        KernelFamily::fp32_attention);
  CHECK(family("mm", product) == KernelFamily::matrix_product);
  device.capability_major = 9;
  CHECK(family("mm", product) == KernelFamily::hopper_product);
  CHECK(family("mm", "Half:2:64x36 Half:2:36x64 > Half:2:64x64") == KernelFamily::hopper_even_product);
  CHECK(family("mm", "Half:2:64x33~ Half:2:33x64 > Half:2:64x64") == KernelFamily::hopper_product);
  CHECK(family("mm", "Half:2:64x64 Half:2:64x33 > Half:2:64x33") == KernelFamily::hopper_odd_product);
}

TEST_CASE("elements are taken one by one where shapes or dtypes differ or neighbours lie apart", "[cost]") {
  const DeviceRates device = fast_device();
  const auto family = [&](const std::string& name, const std::string& values) {
    return family_of(work(name, values), device);
  };
  CHECK(family("mul", "Float:4:8x64 Float:4:8x64 > Float:4:8x64") == KernelFamily::elementwise);
  CHECK(family("mul", "Float:4:8x64 Float:4: > Float:4:8x64") == KernelFamily::elementwise);
  CHECK(family("mul", "Float:4:8x64 Float:4:8x1 > Float:4:8x64") == KernelFamily::mixed_elementwise);
  CHECK(family("mul", "Float:4:8x64~ Float:4:8x64 > Float:4:8x64") == KernelFamily::strided_elementwise);
  CHECK(family("where", "Bool:1:8x64 Float:4:8x64 Float:4:8x64 > Float:4:8x64") == KernelFamily::elementwise);
  CHECK(family("copy_", "Float:4:8x64 Half:2:8x64 i:0 > Float:4:8x64") == KernelFamily::mixed_copy);
  CHECK(family("copy_", "Half:2:8x64 Float:4:8x64 i:0 > Half:2:8x64") == KernelFamily::copy);
  CHECK(work("mul", "Float:4:8x64 Float:4:8x1 > Float:4:8x64").turns == 512);
  CHECK(work("mul", "Float:4:8x64 Float:4:8x64 > Float:4:8x64").turns == 0);
}

TEST_CASE("a layer norm takes its rows in turn", "[cost]") {
  const std::string tensor = "Float:4:8x16x96 ", rows = "Float:4:8x16x1 ";
  CHECK(work("native_layer_norm", tensor + "- Float:4:96 Float:4:96 - > " + tensor + rows + rows).turns == 128);
  CHECK(work("native_layer_norm_backward", tensor + tensor + "- " + rows + rows + "> " + tensor).turns == 128);
}

TEST_CASE("a step is not shorter than the host takes to submit it", "[cost]") {
  DeviceRates device = fast_device();
  device.host_ns_per_operator = 50000;
  const auto step = work_of_last_step(parse_metered_run(kRun), &device, true);
  REQUIRE(step);
  const double forward_ns = host_ns("forward", work("relu", "Float:4:100 > Float:4:100"), device);
  CHECK(forward_ns > 0);
  CHECK(step->phases.at("forward").host_ns == 2 * forward_ns);
  CHECK(step->step_ns() == step->all.host_ns);
  CHECK(step->bound_by() == BoundBy::host);
}

TEST_CASE("views take the host's time, and none of the GPU's", "[cost]") {
  const DeviceRates device = fast_device();
  const auto plain = work_of_last_step(parse_metered_run(kRun), &device, true);
  REQUIRE(plain);
  const std::string views = std::to_string(plain->step) + "\tforward\t0\tviews\t6\t >\n";
  const auto step = work_of_last_step(parse_metered_run(std::string(kRun) + views), &device, true);
  REQUIRE(step);
  CHECK(std::abs(step->all.host_ns - plain->all.host_ns - 6 * host_ns("views", {}, device)) < 1);
  CHECK(host_ns("views", {}, device) > 0);
  CHECK(step->all.time_ns == plain->all.time_ns);
  CHECK(step->all.launches == plain->all.launches);
  CHECK(step->not_metered == plain->not_metered);
}

TEST_CASE("the host's time in the optimizer is by tensors", "[cost]") {
  const OperatorWork list = work("_foreach_add_", "list:Float:60:1000:0 list:Float:60:1000:0 - >");
  CHECK(list.tensors == 60);
  const OperatorWork one = work("add_", "Float:4:10 Float:4:10 > Float:4:10");
  CHECK(host_ns("optimizer", list, {}) == 60 * host_ns("optimizer", one, {}));
}

TEST_CASE("a device whose host was measured has that host's time", "[cost]") {
  const OperatorWork relu = work("relu", "Float:4:100 > Float:4:100");
  const DeviceRates slow{.host_ns_per_operator = 30000};
  CHECK(host_ns("forward", relu, slow) == Approx(30000));
  CHECK(host_ns("backward", relu, slow) / host_ns("backward", relu, {}) ==
        Approx(30000 / host_ns("forward", relu, {})));
}

TEST_CASE("a rate that is not known gives no time", "[cost]") {
  const OperatorWork half = work("mm", "Half:2:64x64 Half:2:64x64 > Half:2:64x64");
  CHECK_FALSE(modelled_time(half, fast_device()));
  CHECK_FALSE(modelled_time(work("relu", "Float:4:100 > Float:4:100"), {}));
}

TEST_CASE("the work of a run is that of its last complete step, without what was set up in it", "[cost]") {
  const DeviceRates device = fast_device();
  const auto step = work_of_last_step(parse_metered_run(kRun), &device, true);
  REQUIRE(step);
  CHECK(step->step == 2);
  CHECK(step->all.launches == 3);
  CHECK(step->all.memory_bytes == 2 * 800 + 3 * 256);
  CHECK(step->all.flops == 1024);
  CHECK(step->phases.at("forward").launches == 2);
  CHECK(step->modules.at(3).launches == 3);
  CHECK(step->has_time);
}

TEST_CASE("a step in which an evaluation falls does not stand for the others", "[cost]") {
  std::string text = "steps\t4\n";
  for (const char* const step : {"1", "2", "3", "4"}) {
    const bool evaluates = *step == '1' || *step == '4';
    text += fmt::format("{}\tforward\t3\taten::relu\t{}\tFloat:4:100 > Float:4:100\n", step, evaluates ? 5 : 2);
    if (*step == '4') text += "4\tforward\t3\taten::mm\t1\tFloat:4:8x8 Float:4:8x8 > Float:4:8x8\n";
  }
  const auto step = work_of_last_step(parse_metered_run(text), nullptr, true);
  REQUIRE(step);
  CHECK(step->step == 3);
  CHECK(step->all.launches == 2);
}

TEST_CASE("a program without steps is reported as a whole, unless it broke off", "[cost]") {
  MeteredRun run = parse_metered_run(kRun);
  run.steps = 0;
  for (MeteredOperator& metered : run.operators) metered.step = 1;
  CHECK(work_of_last_step(run, nullptr, true)->all.launches == 5);
  CHECK_FALSE(work_of_last_step(run, nullptr, false));
}
