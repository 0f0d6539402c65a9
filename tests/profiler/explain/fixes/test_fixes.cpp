#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <set>

#include "profiler/explain/fixes/fix_rules.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/fixes/predict_fixes.h"
#include "profiler/explain/step/what_if.h"
#include "profiler/replay/replay.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

namespace oomdiag {
namespace {

constexpr Where kConv1{.op = "aten::conv2d", .module = "0.conv1"};
constexpr Where kConv2{.op = "aten::conv2d", .module = "0.conv2"};
constexpr Where kHead{.op = "aten::linear", .module = "1.head"};

/// A step whose blocks are given in the order of their births; `died` are positions.
StepAllocations step_of(std::vector<StepAllocation> blocks) { return {.step = 2, .blocks = std::move(blocks)}; }

StepAllocation parameter(int64_t bytes) {
  return {.bytes = bytes, .category = Category::parameter, .phase = Phase::setup};
}

StepAllocation saved(int64_t bytes, uint32_t born, uint32_t died, const Where& made, std::vector<Where> by) {
  return {.bytes = bytes,
          .born = born,
          .died = died,
          .category = Category::activation,
          .phase = Phase::forward,
          .freed_in_backward = true,
          .ever_saved = true,
          .made = made,
          .shape = "[64, 64] float32",
          .saved_by = std::move(by)};
}

StepAllocation gradient_on_its_way(int64_t bytes, uint32_t born, uint32_t died, const Where& made) {
  return {.bytes = bytes,
          .born = born,
          .died = died,
          .category = Category::activation_gradient,
          .phase = Phase::backward,
          .made = made};
}

/// Two convolutions in one module, a head, and the backward of all three.
StepAllocations small_step() {
  return step_of({parameter(32_MiB), saved(64_MiB, 1, 12, kConv1, {kConv2}), saved(64_MiB, 2, 10, kConv1, {kConv1}),
                  saved(16_MiB, 3, 8, kConv2, {kHead, kConv2}), gradient_on_its_way(16_MiB, 7, 9, kHead),
                  gradient_on_its_way(64_MiB, 9, 11, kConv2)});
}

StepModel model_of(const StepAllocations& step_allocations) {
  return {
      .blocks = step_allocations.blocks, .peak_bytes = find_peak(step_allocations.blocks), .available_bytes = 1_GiB};
}

const Fix* find(const std::vector<Fix>& fixes, std::string_view id) {
  const auto found = std::find_if(fixes.begin(), fixes.end(), [&](const Fix& r) { return r.id == id; });
  return found == fixes.end() ? nullptr : &*found;
}

}  // namespace

TEST_CASE("an id names one row, with and without its number", "[explain][fixes]") {
  std::set<std::string_view> ids;
  for (const FixRow& row : list_fixes()) {
    INFO(row.id);
    CHECK(ids.insert(row.id).second);
    CHECK(find_fix(row.id) == &row);
    CHECK((row.predict != nullptr) == !row.formula.empty());
  }
  CHECK(find_fix("batch_6012") == find_fix("batch"));
  CHECK(find_fix("accumulate_2") == find_fix("accumulate"));
  CHECK(find_fix("autocast_bf16")->id == "autocast_bf16");
  CHECK(find_fix("checkpoint+autocast_bf16") == nullptr);
  CHECK(find_fix("") == nullptr);
}

TEST_CASE("each fix that is applied to a program has its Python module, and each module its fix", "[explain][fixes]") {
  const std::filesystem::path sources = std::filesystem::path(OOMDIAG_SCHEMA_FILE).parent_path() / "../..";
  std::set<std::string> named, there;
  for (const FixRow& row : list_fixes()) {
    if (row.has_module) named.emplace(row.id);
    CHECK((row.configure == nullptr || row.has_module));
  }
  for (const auto& file : std::filesystem::directory_iterator(sources / "extension/python/fixes/oomdiag_fixes")) {
    if (file.path().extension() != ".py") continue;
    std::ifstream text(file.path());
    const std::string code(std::istreambuf_iterator<char>(text), {});
    if (code.find("\ndef apply(") != code.npos) there.insert(file.path().stem());
  }
  there.erase("look");            // it looks only
  there.erase("loader_batches");  // of fit --lengths loader
  CHECK(named == there);
}

TEST_CASE("what fits and changes nothing comes first, then what costs less", "[explain][fixes]") {
  const auto fix = [](std::string id, std::optional<bool> fits, int64_t peak) {
    return Fix{.id = std::move(id), .label = "", .predicted_peak_bytes = peak, .predicted_fits = fits};
  };
  const Fix segments = fix("expandable_segments", true, 9_GiB), halved = fix("half_batch", true, 1_GiB);
  const Fix unknown = fix("relu_in_place", {}, 2_GiB), autocast = fix("autocast_bf16", true, 7_GiB);
  CHECK(is_better(segments, autocast));
  CHECK(is_better(autocast, halved));
  CHECK(is_better(halved, unknown));
  Fix measured = unknown;
  measured.fits = true;
  CHECK(is_better(measured, autocast));
  Fix training = autocast;
  training.changes_training = true;
  CHECK(is_better(halved, training));
}

TEST_CASE("the peak of a step is where most of its blocks overlap", "[explain][fixes]") {
  CHECK(find_peak({}) == 0);
  CHECK(find_peak({{.bytes = 4, .born = 1, .died = 2}, {.bytes = 8, .born = 2, .died = 3}}) == 8);
  CHECK(find_peak(small_step().blocks) == 224_MiB);  // after position 9 both large ones and the new gradient
}

TEST_CASE("half the batch halves what follows it, and parameters stay", "[explain][fixes]") {
  const StepAllocations step_allocations = small_step();
  const auto fixes = predict_fixes(model_of(step_allocations));

  REQUIRE(find(fixes, "half_batch"));
  CHECK(find(fixes, "half_batch")->predicted_peak_bytes == 32_MiB + 192_MiB / 2);
  CHECK_FALSE(find(fixes, "half_batch")->formula.empty());
}

TEST_CASE("where nothing is trained, fewer examples change nothing that is learned", "[explain][fixes]") {
  StepAllocations trained = small_step(), served;
  served.blocks = {parameter(32_MiB)};
  for (StepAllocation block : small_step().blocks) {
    if (block.category != Category::activation) continue;
    block.category = Category::output;
    served.blocks.push_back(block);
  }
  served.step = trained.step;
  const auto of_training = predict_fixes(model_of(trained));
  StepModel model = model_of(served);
  model.has_backward = false;
  const auto of_serving = predict_fixes(model);
  REQUIRE(find(of_training, "half_batch"));
  REQUIRE(find(of_serving, "half_batch"));
  CHECK(find(of_training, "half_batch")->changes_training);
  CHECK_FALSE(find(of_serving, "half_batch")->changes_training);
  CHECK(find(of_serving, "half_batch")->costs == "fewer examples at a time");
}

TEST_CASE("a parameter's gradient does not follow the batch", "[explain][fixes]") {
  const Allocations blocks = {parameter(32_MiB), gradient_on_its_way(32_MiB, 1, 2, kConv1),
                              gradient_on_its_way(48_MiB, 1, 2, kConv1)};
  CHECK_FALSE(follows_batch(blocks[0], blocks));
  CHECK_FALSE(follows_batch(blocks[1], blocks));
  CHECK(follows_batch(blocks[2], blocks));
}

TEST_CASE("the largest batch that fits is found from the same model", "[explain][fixes]") {
  const StepAllocations step_allocations = small_step();
  StepModel model = model_of(step_allocations);
  model.batch = 64;
  model.available_bytes = 32_MiB + 48_MiB;  // a quarter of what scales
  const auto fixes = predict_fixes(model);

  const auto found =
      std::find_if(fixes.begin(), fixes.end(), [](const Fix& fix) { return fix.id.starts_with("batch_"); });
  REQUIRE(found != fixes.end());
  CHECK(found->predicted_fits == true);
  CHECK(std::stoi(found->id.substr(6)) <= 16);  // 16 leave nothing for fragmentation
  CHECK(std::stoi(found->id.substr(6)) >= 10);
}

TEST_CASE("checkpointing frees what only the module saves, until its backward", "[explain][fixes]") {
  StepAllocations step_allocations = small_step();
  step_allocations.blocks.push_back(gradient_on_its_way(8_MiB, 20, 21, kConv1));
  const auto fixes = predict_fixes(model_of(step_allocations));

  const Fix* fix = find(fixes, "checkpoint");
  CHECK((fix == nullptr || fix->predicted_peak_bytes < 224_MiB));

  // Two modules of equal size: only one of them has its tensors at a time.
  const Where a{.op = "aten::relu", .module = "a.relu"}, b{.op = "aten::relu", .module = "b.relu"};
  const StepAllocations two = step_of({saved(64_MiB, 1, 20, a, {a}), saved(64_MiB, 2, 20, a, {a}),
                                       saved(64_MiB, 3, 12, b, {b}), saved(64_MiB, 4, 12, b, {b}),
                                       gradient_on_its_way(1_MiB, 10, 22, b), gradient_on_its_way(1_MiB, 14, 22, a)});
  const auto both = predict_fixes(model_of(two));
  REQUIRE(find(both, "checkpoint"));
  CHECK(find(both, "checkpoint")->modules == std::vector<std::string>{"a", "b"});
  CHECK(find(both, "checkpoint")->predicted_peak_bytes == 128_MiB + 2_MiB);
}

TEST_CASE("what several checkpointed modules free adds up, at each position", "[explain][fixes]") {
  const Where first{.op = "aten::linear", .module = "h.0"}, second{.op = "aten::linear", .module = "h.1"};
  const Allocations blocks{saved(64_MiB, 1, 12, first, {first}),      saved(8_MiB, 2, 11, first, {first, second}),
                           saved(32_MiB, 3, 8, second, {second}),     gradient_on_its_way(4_MiB, 7, 9, second),
                           gradient_on_its_way(2_MiB, 10, 11, first), gradient_on_its_way(1_MiB, 12, 13, first)};
  const std::vector<std::string> both{"h.0", "h.1"}, one{"h.0"}, other{"h.1"};
  const std::vector<int64_t> as_it_is = list_bytes_in_use(blocks);
  const std::vector<int64_t> with_both = list_bytes_in_use(checkpoint_paths(blocks, both));
  const std::vector<int64_t> with_one = list_bytes_in_use(checkpoint_paths(blocks, one));
  const std::vector<int64_t> with_other = list_bytes_in_use(checkpoint_paths(blocks, other));
  REQUIRE(with_both.size() == as_it_is.size());
  for (size_t i = 0; i < as_it_is.size(); ++i) {
    CHECK(as_it_is[i] - with_both[i] == as_it_is[i] - with_one[i] + as_it_is[i] - with_other[i]);
  }
  CHECK(with_one[5] == as_it_is[5] - 64_MiB);
  CHECK(with_one[10] == as_it_is[10]);  // recomputed
}

TEST_CASE("of a checkpointed module's output one copy lives at a time", "[explain][fixes]") {
  const Where c{.op = "aten::relu", .module = "c.relu"}, a{.op = "aten::relu", .module = "a.relu"};
  const Where pool{.op = "aten::max_pool2d", .module = "pool"};
  const StepAllocations step_allocations =
      step_of({saved(64_MiB, 1, 30, c, {c}), saved(64_MiB, 2, 30, c, {c}), saved(64_MiB, 3, 20, a, {a}),
               saved(64_MiB, 4, 20, a, {a}), saved(64_MiB, 5, 13, a, {a, pool}),
               gradient_on_its_way(32_MiB, 10, 13, pool), gradient_on_its_way(32_MiB, 12, 22, a),
               gradient_on_its_way(1_MiB, 19, 22, a), gradient_on_its_way(1_MiB, 21, 30, c)});
  const auto fixes = predict_fixes(model_of(step_allocations));

  // When the backward of a begins, its three tensors are recomputed; the output that pool had kept goes then.
  REQUIRE(find(fixes, "checkpoint"));
  CHECK(find(fixes, "checkpoint")->modules == std::vector<std::string>{"a", "c"});
  CHECK(find(fixes, "checkpoint")->predicted_peak_bytes == 3 * 64_MiB + 2 * 32_MiB);
}

TEST_CASE("autocast halves convolutions and what follows, but not softmax and norms", "[explain][fixes]") {
  const Where conv{.op = "aten::conv2d", .module = "conv"}, relu{.op = "aten::relu", .module = "relu"};
  const Where softmax{.op = "aten::log_softmax", .module = "loss"};
  const StepAllocations step_allocations = step_of(
      {saved(64_MiB, 1, 9, conv, {relu}), saved(64_MiB, 2, 9, relu, {relu}), saved(16_MiB, 3, 9, softmax, {softmax})});
  const auto fixes = predict_fixes(model_of(step_allocations));

  REQUIRE(find(fixes, "autocast_bf16"));
  const int64_t operand_of_softmax = 16_MiB;  // in float32, while it runs
  CHECK(find(fixes, "autocast_bf16")->predicted_peak_bytes == 32_MiB + 32_MiB + 16_MiB + operand_of_softmax);

  // What is not seen could make all of it bfloat16 but the softmax: of a step that was cut short that is the lower bound.
  StepModel cut = model_of(step_allocations);
  cut.whole = false;
  const auto bounds = predict_fixes(cut);
  REQUIRE(find(bounds, "autocast_bf16"));
  CHECK(find(bounds, "autocast_bf16")->at_least);
  CHECK(find(bounds, "autocast_bf16")->predicted_peak_bytes == 32_MiB + 32_MiB + 16_MiB);

  // What goes on with float32 in the same module is float32, up to the next product.
  const Where power{.op = "aten::pow", .module = "act"}, tanh{.op = "aten::tanh", .module = "act"};
  cut.blocks = {saved(64_MiB, 1, 9, power, {power}), saved(64_MiB, 2, 9, tanh, {tanh}),
                saved(64_MiB, 3, 9, conv, {relu}), saved(64_MiB, 4, 9, tanh, {tanh})};
  const auto of_act = predict_fixes(cut);
  REQUIRE(find(of_act, "autocast_bf16"));
  CHECK(find(of_act, "autocast_bf16")->predicted_peak_bytes == cut.peak_bytes - 64_MiB);
}

TEST_CASE("gradients kept through forward are what set_to_none saves", "[explain][fixes]") {
  StepAllocation kept{.bytes = 32_MiB, .category = Category::gradient, .phase = Phase::backward};
  StepAllocation added = gradient_on_its_way(32_MiB, 5, 6, kConv1);
  added.freed_by_accumulate = true;
  const StepAllocations step_allocations = step_of({kept, saved(64_MiB, 1, 5, kConv1, {kConv1}), added});
  const auto fixes = predict_fixes(model_of(step_allocations));

  REQUIRE(find(fixes, "set_to_none"));
  CHECK(find(fixes, "set_to_none")->predicted_peak_bytes == 64_MiB);
}

TEST_CASE("adapters of linear layers are no fix where tables have most of the gradients", "[explain][fixes]") {
  StepAllocation gradient{.bytes = 512_MiB,
                          .born = 1,
                          .category = Category::gradient,
                          .phase = Phase::backward,
                          .made = {.node = "EmbeddingBackward0", .op = "aten::embedding"}};
  const auto has_adapters = [&] {
    const StepModel model = model_of(step_of({parameter(512_MiB), gradient}));
    return find_fix("lora")->predict(model).has_value();
  };
  CHECK_FALSE(has_adapters());
  gradient.made = {.node = "AddmmBackward0", .op = "aten::linear"};
  CHECK(has_adapters());
}

TEST_CASE("8-bit Adam makes smaller state; what a file has of it stays as large", "[explain][fixes]") {
  StepAllocation state{.bytes = 64_MiB, .category = Category::optimizer_state, .phase = Phase::optimizer};
  const auto at_least = [&] {
    StepModel model = model_of(step_of({parameter(32_MiB), state}));
    model.optimizer = "Adam";
    return find_fix("adam_8bit")->predict(model)->at_least;
  };
  CHECK_FALSE(at_least());
  state.phase = Phase::setup;
  CHECK(at_least());
}

TEST_CASE("a fused optimizer has no temporaries, SGD no state", "[explain][fixes]") {
  const StepAllocation state{.bytes = 64_MiB, .category = Category::optimizer_state, .phase = Phase::optimizer};
  const StepAllocation scratch{.bytes = 32_MiB,
                               .born = 1,
                               .died = 2,
                               .category = Category::temporary,
                               .phase = Phase::optimizer,
                               .made = {.op = "aten::_foreach_sqrt"}};
  const StepAllocations step_allocations = step_of({parameter(32_MiB), state, scratch});
  const auto fixes = predict_fixes(model_of(step_allocations));

  REQUIRE(find(fixes, "fused_optimizer"));
  CHECK(find(fixes, "fused_optimizer")->predicted_peak_bytes == 96_MiB);
  REQUIRE(find(fixes, "sgd"));
  CHECK(find(fixes, "sgd")->predicted_peak_bytes == 32_MiB);
}

TEST_CASE("without backward no_grad keeps what the next module takes, and nothing else", "[explain][fixes]") {
  Allocations blocks;
  const std::array<const char*, 4> modules = {"0.a", "0.b", "1", "2"};
  for (uint32_t i = 0; i < modules.size(); ++i) {
    blocks.push_back({.bytes = 16_MiB, .born = i + 1, .category = Category::output, .phase = Phase::forward});
    blocks.back().in_graph = true;
    blocks.back().made.module = modules[i];
  }
  const StepAllocations step_allocations = step_of(blocks);
  StepModel model = model_of(step_allocations);
  model.has_backward = false;
  const auto fixes = predict_fixes(model);

  REQUIRE(find(fixes, "no_grad"));
  CHECK(find(fixes, "no_grad")->predicted_peak_bytes == 32_MiB);
  model.has_backward = true;  // in other steps: this one is an evaluation
  model.other_peak_bytes = 48_MiB;
  const auto of_training = predict_fixes(model);
  REQUIRE(find(of_training, "no_grad"));
  CHECK(find(of_training, "no_grad")->label == "torch.no_grad() around the pass that no backward follows");
  CHECK(find(of_training, "no_grad")->predicted_peak_bytes == 48_MiB);
}

TEST_CASE("with no_grad a loop has the input of one pass at a time", "[explain][fixes]") {
  Allocations blocks;
  for (uint32_t pass = 0; pass < 3; ++pass) {
    blocks.push_back({.bytes = 64_MiB, .born = 2 * pass + 1, .category = Category::input, .phase = Phase::forward});
    blocks.back().made.source = "train.py:9";
    blocks.push_back(
        {.bytes = 16_MiB, .born = 2 * pass + 2, .category = Category::activation, .phase = Phase::forward});
    blocks.back().in_graph = true;
    blocks.back().made.module = "net";
  }
  const StepAllocations step_allocations = step_of(blocks);
  StepModel model = model_of(step_allocations);
  model.has_backward = false;
  const auto fixes = predict_fixes(model);

  REQUIRE(find(fixes, "no_grad"));
  CHECK(find(fixes, "no_grad")->predicted_peak_bytes == 160_MiB);  // of two passes, as the variable is assigned anew
}

TEST_CASE("a cure that a row predicts from the step has that row's figure, and takes its place", "[explain][fixes]") {
  Allocations blocks;
  const std::array<const char*, 4> modules = {"0.a", "0.b", "1", "2"};
  for (uint32_t i = 0; i < modules.size(); ++i) {
    blocks.push_back({.bytes = 16_MiB, .born = i + 1, .category = Category::output, .phase = Phase::forward});
    blocks.back().in_graph = true;
    blocks.back().made = {.op = "aten::linear", .module = modules[i], .source = "train.py:3"};
  }
  StepModel model = model_of(step_of(blocks));
  model.has_backward = false;
  auto fixes = predict_fixes(model);
  const size_t count = fixes.size();
  add_cure(
      {.id = "evaluation", .text = {}, .bytes = 8_MiB, .fix = "no_grad_in_evaluation", .how = {"around train.py:3"}},
      model, fixes);

  CHECK(fixes.size() == count);
  CHECK_FALSE(find(fixes, "no_grad"));
  CHECK(fixes.front().id == "no_grad_in_evaluation");
  CHECK(fixes.front().predicted_peak_bytes == 32_MiB);
  CHECK_FALSE(fixes.front().frees_bytes);
  CHECK(fixes.front().how == std::vector<std::string>{"around train.py:3"});
}

TEST_CASE("an input that autograd alone keeps is gone before backward where activations are offloaded",
          "[explain][fixes]") {
  StepAllocations step = small_step();
  step.blocks.insert(step.blocks.begin() + 1, {.bytes = 128_MiB,
                                               .born = 1,
                                               .died = 12,
                                               .category = Category::input,
                                               .phase = Phase::other,
                                               .freed_in_backward = true});
  step.blocks.push_back(gradient_on_its_way(32_MiB, 10, 11, kConv2));
  const auto offloaded_peak = [&] {
    const auto fixes = predict_fixes(model_of(step));
    const Fix* const fix = find(fixes, "offload_activations");
    return fix == nullptr ? 0 : fix->predicted_peak_bytes;
  };
  CHECK(offloaded_peak() == 32_MiB + 128_MiB + 64_MiB);  // in forward
  step.blocks[1].freed_in_backward = false;
  CHECK(offloaded_peak() == 32_MiB + 128_MiB + 96_MiB);  // in backward
}

TEST_CASE("in an evaluation of a program that trains no line is about the training step", "[explain][fixes]") {
  Allocations blocks;
  const std::array<const char*, 4> modules = {"0", "1", "2", "3"};
  for (uint32_t i = 0; i < modules.size(); ++i) {
    blocks.push_back({.bytes = 16_MiB, .born = i + 1, .category = Category::activation, .phase = Phase::forward});
    blocks.back().made = {.op = "aten::linear", .module = modules[i], .source = "train.py:3"};
    blocks.back().shape = "[64, 65536] float32";
  }
  const auto fixes = predict_fixes(model_of(step_of(blocks)));

  CHECK_FALSE(find(fixes, "accumulate_2"));
  REQUIRE(find(fixes, "autocast_bf16"));
  CHECK(find(fixes, "autocast_bf16")->how.back() == "    output = model(x)");
}

TEST_CASE("an OOM in forward does not show that no backward follows", "[explain][fixes]") {
  StepAllocation output{.bytes = 64_MiB, .born = 1, .category = Category::output, .phase = Phase::forward};
  output.in_graph = true;
  const StepAllocations step_allocations = step_of({output, output});
  StepModel model = model_of(step_allocations);
  model.has_backward = model.whole = false;
  CHECK_FALSE(find(predict_fixes(model), "no_grad"));
}

TEST_CASE("in a leak the cure fits, and everything else postpones", "[explain][fixes]") {
  StepAllocations step_allocations = small_step();
  step_allocations.blocks.insert(step_allocations.blocks.begin(),
                                 {.bytes = 400_MiB, .category = Category::output, .phase = Phase::forward});
  StepModel model = model_of(step_allocations);
  model.available_bytes = model.peak_bytes - 8_MiB;
  model.grown_bytes = 400_MiB;
  model.grown_per_step = 8_MiB;
  model.last_step = 50;
  model.growing_place = "train.py:11";
  model.leaks = true;
  const auto fixes = predict_fixes(model);
  REQUIRE_FALSE(fixes.empty());
  CHECK(fixes.front().id == "stop_growth");
  CHECK(fixes.front().label == "stop keeping tensors across steps (train.py:11)");
  CHECK(fixes.front().predicted_fits == true);
  CHECK_FALSE(fixes.front().postpones_to_step);
  for (const Fix& fix : fixes) {
    INFO(fix.id);
    if (fix.id != "stop_growth") CHECK(fix.predicted_fits == false);
    CHECK(fix.ids.empty());  // no pair is enough
  }
  // Half the batch leaves half of what grew, and each step leaves half as much: 288 MiB are left for 4 MiB a step.
  REQUIRE(find(fixes, "half_batch"));
  CHECK(find(fixes, "half_batch")->postpones_to_step == 50 + 72);
  model.grown_per_step = 400_MiB;  // half of that is more than half of what is left for it
  CHECK_FALSE(find(predict_fixes(model), "half_batch")->postpones_to_step);
}

TEST_CASE("in a leak the same change as the cure is no second row, whatever it does for one step", "[explain][fixes]") {
  Fix cure{.id = "no_grad_in_evaluation", .label = {}};
  const Fix same{.id = "no_grad", .label = {}, .predicted_peak_bytes = 11_GiB, .predicted_fits = false};
  std::vector<Fix> fixes{same};
  replace_same(cure, fixes);
  CHECK(fixes.size() == 1);
  replace_same(cure, fixes, /*of_leak=*/true);
  CHECK(fixes.empty());
  CHECK(cure.predicted_peak_bytes == 0);
}

TEST_CASE("a request for scores that softmax did not reach goes with fused attention, too", "[explain][fixes]") {
  const Where first{.op = "aten::softmax", .module = "h.0.attn"}, last{.op = "aten::bmm", .module = "h.1.attn"};
  StepAllocation scores = saved(64_MiB, 1, 9, first, {first});
  scores.shape = "[8, 16, 256, 256] float32";
  const StepAllocation request{.bytes = 64_MiB, .born = 2, .phase = Phase::forward, .made = last};
  const StepAllocations step_allocations = step_of({parameter(32_MiB), scores, request});
  REQUIRE(find(predict_fixes(model_of(step_allocations)), "sdpa"));
  CHECK(find(predict_fixes(model_of(step_allocations)), "sdpa")->predicted_peak_bytes == 32_MiB);
}

TEST_CASE("a softmax of the classes of pixels is no attention, which has a product", "[explain][fixes]") {
  const Where softmax{.op = "aten::softmax"}, product{.op = "aten::bmm"};
  StepAllocation classes = saved(64_MiB, 2, 9, softmax, {softmax});
  classes.shape = "[8, 16, 256, 256] float32";
  StepAllocation logits{.bytes = 64_MiB, .born = 1, .phase = Phase::forward, .made = {.op = "aten::conv2d"}};
  CHECK_FALSE(find(predict_fixes(model_of(step_of({parameter(32_MiB), logits, classes}))), "sdpa"));
  logits.made = product;
  CHECK(find(predict_fixes(model_of(step_of({parameter(32_MiB), logits, classes}))), "sdpa"));
}

TEST_CASE("gradients may lie in the buckets that DistributedDataParallel reduces them in", "[explain][fixes]") {
  const StepAllocation bucket{
      .bytes = 32_MiB, .category = Category::gradient, .phase = Phase::setup, .made = {.op = "aten::empty"}};
  const StepAllocation gradient{.bytes = 32_MiB,
                                .born = 2,
                                .category = Category::gradient,
                                .phase = Phase::backward,
                                .made = {.node = "MmBackward0", .op = "aten::linear"}};
  const auto fixes = predict_fixes(model_of(step_of({parameter(32_MiB), bucket, gradient})));
  REQUIRE(find(fixes, "ddp_bucket_view"));
  CHECK(find(fixes, "ddp_bucket_view")->predicted_peak_bytes == 64_MiB);
  CHECK_FALSE(find(predict_fixes(model_of(step_of({parameter(32_MiB), bucket}))), "ddp_bucket_view"));
}

TEST_CASE("casts of weights do not follow the batch, and no_grad does not remove them", "[explain][fixes]") {
  StepAllocation cast{
      .bytes = 16_MiB, .born = 1, .category = Category::output, .phase = Phase::forward, .in_graph = true};
  cast.made = {.op = "aten::linear", .inner = "aten::_to_copy", .module = "0"};
  cast.made.autocast = "float16";
  const Allocations blocks = {parameter(32_MiB), cast};
  CHECK_FALSE(follows_batch(cast, blocks));
  CHECK(follows_batch(cast, {parameter(16_MiB), cast}));  // half of no parameter

  StepModel model = model_of(step_of(blocks));
  model.has_backward = false;
  CHECK_FALSE(find(predict_fixes(model), "no_grad"));
}

TEST_CASE("a batch of one has no half", "[explain][fixes]") {
  StepAllocations step_allocations = small_step();
  for (StepAllocation& block : step_allocations.blocks) {
    if (block.category == Category::activation) block.shape = "[1, 32768, 4096] float32";
  }
  const auto fixes = predict_fixes(model_of(step_allocations));
  CHECK_FALSE(find(fixes, "half_batch"));
  CHECK_FALSE(find(fixes, "accumulate_2"));
}

TEST_CASE("a program whose steps went by without backward gets no lines for training", "[explain][fixes]") {
  StepModel model = model_of(small_step());
  model.has_backward = false;
  model.only_infers = true;
  const auto fixes = predict_fixes(model);
  for (const char* id : {"accumulate_2", "checkpoint", "offload_activations"}) CHECK_FALSE(find(fixes, id));
  REQUIRE(find(fixes, "half_batch"));
  CHECK_FALSE(find(fixes, "half_batch")->changes_training);
}

TEST_CASE("checkpoints are for modules whose forward runs: a list of modules is meant by its children",
          "[explain][fixes]") {
  std::vector<std::string> names;
  for (int i = 0; i < 3; ++i) names.push_back("blocks." + std::to_string(i));
  StepAllocations step_allocations{.step = 1};
  for (uint32_t i = 0; i < 3; ++i) {
    const Where layer{.op = "aten::relu", .module = names[i], .source = "/home/me/gpt.py:12"};
    for (uint32_t b = 0; b < 2; ++b)
      step_allocations.blocks.push_back(saved(64_MiB, 2 * i + b + 1, 40 - 5 * i, layer, {layer}));
    step_allocations.blocks.push_back(gradient_on_its_way(1_MiB, 39 - 5 * i, 41 - 5 * i, layer));
  }
  const auto fixes = predict_fixes(model_of(step_allocations));
  const Fix* fix = find(fixes, "checkpoint");
  REQUIRE(fix);
  CHECK(fix->modules == names);
  CHECK(fix->how.back() == "checkpoint_forward(*model.blocks)");
  CHECK(std::ranges::count(fix->how, "def checkpoint_forward(*modules):") == 1);
}

TEST_CASE("the largest batch is one with which the step gets through the allocator", "[explain][fixes]") {
  StepModel model = model_of(small_step());
  model.available_bytes = 1_GiB;
  const int64_t largest = find_largest_batch(model, 64);  // 192 MiB of 64 examples would be 992 MiB of 330
  CHECK(largest > 64);
  CHECK(largest < 330);  // the last sixty-fourth and fragmentation are not promised
}

TEST_CASE("what a closure of an optimizer's step computes follows the batch, its own temporaries do not",
          "[explain][fixes]") {
  Allocations blocks;
  for (const Category category : {Category::activation, Category::output, Category::temporary})
    blocks.push_back({.bytes = 64_MiB, .category = category, .phase = Phase::optimizer});
  const Allocations halved = scale_batch(blocks, 1, 2);
  CHECK(halved[0].bytes == 32_MiB);
  CHECK(halved[1].bytes == 32_MiB);
  CHECK(halved[2].bytes == 64_MiB);
}

TEST_CASE("of a step without anything that follows the batch, no larger batch is promised", "[explain][fixes]") {
  StepAllocations step_allocations{.step = 1};
  step_allocations.blocks.push_back(parameter(4_MiB));
  StepModel model = model_of(step_allocations);
  model.available_bytes = 1_GiB;
  CHECK(find_largest_batch(model, 64) == 64);
}

TEST_CASE("sharding over GPUs is for those who do not shard yet", "[explain][fixes]") {
  StepAllocations step_allocations = small_step();
  step_allocations.blocks.push_back(
      {.bytes = 128_MiB, .category = Category::optimizer_state, .phase = Phase::optimizer});
  StepModel model = model_of(step_allocations);
  CHECK(find(predict_fixes(model), "fsdp_2"));
  model.sharded = true;
  CHECK_FALSE(find(predict_fixes(model), "fsdp_2"));
}

TEST_CASE("what fits only with the help of what private pools keep is not said to fit", "[explain][fixes]") {
  const StepAllocations step_allocations = small_step();
  const auto fits = [&](int64_t available_bytes, int64_t private_pool_cached_bytes) {
    StepModel model = model_of(step_allocations);
    model.available_bytes = available_bytes;
    model.private_pool_cached_bytes = private_pool_cached_bytes;
    return find(predict_fixes(model), "half_batch")->predicted_fits;
  };
  CHECK(fits(1_GiB, 0) == true);
  CHECK(fits(1_GiB, 512_MiB) == true);
  CHECK_FALSE(fits(1_GiB, 1_GiB - 64_MiB));  // not known: the step itself may be in such a pool
  CHECK(fits(64_MiB, 32_MiB) == false);
}

TEST_CASE("of a step that was cut short only too much is known", "[explain][fixes]") {
  const StepAllocations step_allocations = small_step();
  StepModel model = model_of(step_allocations);
  model.whole = false;
  auto fixes = predict_fixes(model);
  REQUIRE(find(fixes, "half_batch"));
  CHECK(find(fixes, "half_batch")->at_least);
  CHECK_FALSE(find(fixes, "half_batch")->predicted_fits);  // not known

  model.available_bytes = 100_MiB;
  fixes = predict_fixes(model);
  CHECK(find(fixes, "half_batch")->predicted_fits == false);
}

TEST_CASE("autocast is for float32 models that are not under it, bf16 for GPUs that have it", "[explain][fixes]") {
  const auto offered = [](const char* dtype, std::string_view autocast, int compute_major) {
    StepAllocation weight = parameter(64_MiB);
    const std::string shape = std::string("[64] ") + dtype;
    weight.shape = shape;
    StepAllocation output = saved(64_MiB, 1, 9, kConv1, {kConv2});
    output.shape = {};  // not known
    output.made.autocast = autocast;
    const StepAllocations step_allocations = step_of({weight, output});
    StepModel model = model_of(step_allocations);
    model.compute_major = compute_major;
    for (const Fix& fix : predict_fixes(model)) {
      if (fix.id.starts_with("autocast")) return fix.id;
    }
    return std::string();
  };
  CHECK(offered("float32", "", 8) == "autocast_bf16");
  CHECK(offered("float32", "", 7) == "autocast_fp16");
  CHECK(offered("float32", "float16", 8).empty());
  CHECK(offered("bfloat16", "", 8).empty());
}

TEST_CASE("checkpointed layers are named in the order of their numbers, and recomputed one at a time",
          "[explain][fixes]") {
  std::vector<std::string> names;
  for (int i = 0; i < 12; ++i) names.push_back("model.h." + std::to_string(i));
  StepAllocations step_allocations{.step = 1};
  for (uint32_t i = 0; i < 12; ++i) {
    const Where layer{.op = "aten::relu", .module = names[i]};
    for (uint32_t b = 0; b < 2; ++b)
      step_allocations.blocks.push_back(saved(64_MiB, 2 * i + b + 1, 100, layer, {layer}));
  }
  StepModel model = model_of(step_allocations);
  model.whole = false;  // its backward was not seen
  model.forward_end = 50;
  const auto fixes = predict_fixes(model);

  const Fix* fix = find(fixes, "checkpoint");
  REQUIRE(fix);
  CHECK(fix->label == "checkpoint model.h.*");
  CHECK(fix->modules == names);
  CHECK(fix->predicted_peak_bytes == 128_MiB);
}

TEST_CASE("outputs that nobody needs in backward end before it", "[explain][fixes]") {
  StepAllocation output{.bytes = 16_MiB, .born = 2, .category = Category::output, .phase = Phase::forward};
  const StepAllocations step_allocations =
      step_of({saved(64_MiB, 1, 9, kConv1, {kConv1}), output, gradient_on_its_way(64_MiB, 8, 10, kConv1)});
  const auto fixes = predict_fixes(model_of(step_allocations));

  REQUIRE(find(fixes, "drop_outputs"));
  CHECK(find(fixes, "drop_outputs")->predicted_peak_bytes == 128_MiB);
}

TEST_CASE("where nothing would be saved, nothing is proposed", "[explain][fixes]") {
  const StepAllocations step_allocations = step_of({parameter(4_GiB)});
  CHECK(predict_fixes(model_of(step_allocations)).empty());
  CHECK(predict_fixes(model_of(StepAllocations{})).empty());
}

TEST_CASE("the lives of a step that fits have its peak, and those that failed include the request", "[replay][lives]") {
  const Trace fits = training_that_fits();
  const DeviceHistory device = replay(fits).devices.at(0);
  CHECK(device.step_allocations.step == device.peak.step);
  CHECK(find_peak(device.step_allocations.blocks) == device.peak.allocated_bytes);

  const Trace fails = oom_in_backward();
  const DeviceHistory failed = replay(fails).devices.at(0);
  CHECK(find_peak(failed.step_allocations.blocks) == failed.state.allocated_bytes + failed.failure->requested_bytes);
}

TEST_CASE("the categories of the lives are those of the described moment", "[replay][lives]") {
  for (const Trace& trace : {training_that_fits(), oom_in_backward(), oom_in_optimizer()}) {
    const DeviceHistory device = replay(trace).devices.at(0);
    for (const LiveBlock& block : device.state.blocks) {
      const auto alike = [&](const StepAllocation& life) {
        return life.bytes == block.bytes && life.category == block.category;
      };
      CHECK(std::any_of(device.step_allocations.blocks.begin(), device.step_allocations.blocks.end(), alike));
    }
  }
}

}  // namespace oomdiag
