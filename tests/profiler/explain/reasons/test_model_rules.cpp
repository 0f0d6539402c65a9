#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of model_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

TEST_CASE("layers of one model that went to the GPU one by one are no models", "[explain][reasons]") {
  const Where moved{.op = "aten::to", .source = "eval.py:5"};
  std::vector<LiveBlock> blocks;
  DeviceHistory device;
  for (uint64_t layer = 0; layer < 4; ++layer) {
    blocks.push_back({.bytes = 50_MiB,
                      .requested_bytes = 50_MiB,
                      .category = Category::parameter,
                      .born = 10 * layer + 1,
                      .made = moved,
                      .name = "fc1.weight",
                      .shape = "[3072, 768] float32"});
  }
  blocks.push_back({.bytes = 1_MiB,
                    .category = Category::output,
                    .born = 5,
                    .made = {.op = "aten::linear", .module = "fc1", .source = "net.py:5"}});
  device = at_oom(std::move(blocks));
  device.referrers = std::vector<Referrer>(
      4, {.variable = "dict 'model._modules[\"layers\"]._modules[0]._parameters' in main (eval.py:9)", .made = moved});
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "4 layers of model went to the GPU one after another at eval.py:5, and none went back: 200.00 MiB");
  CHECK(reason->how.front().starts_with("layer.cpu()"));
}

TEST_CASE("models of which variables lead to one at most are reference cycles", "[explain][reasons]") {
  LiveBlock weight = parameter("0.weight", true);
  weight.bytes = 50_MiB;
  weight.made = {.op = "aten::to", .source = "folds.py:3"};
  DeviceHistory device = at_oom({weight, weight, weight});
  CHECK(reason_of(device) == "several_models");
  device.looked_for_referrers = true;
  device.referrers = {{.variable = "dict 'net._parameters' in folds.py", .made = weight.made}};
  CHECK(reason_of(device) == "reference_cycle");
  device.referrers = std::vector<Referrer>(3, device.referrers.front());
  CHECK(reason_of(device) == "several_models");
}

TEST_CASE("the variable that has the older of two models is named, and deleted", "[explain][reasons]") {
  LiveBlock old = parameter("0.weight", true);
  old.bytes = 50_MiB;
  old.made = {.op = "aten::to", .source = "stages.py:3"};
  LiveBlock now = old;
  old.born = 1;
  now.born = 9;
  DeviceHistory device = at_oom({old, now});
  device.referrers = {{.variable = "dict 'tuned._parameters' in main (stages.py:20)", .made = old.made, .born = 1},
                      {.variable = "list 'optimizer.param_groups' in tune (stages.py:9)", .made = now.made, .born = 9}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->kept_by == "variable 'tuned' in main (stages.py:20)");
  CHECK(reason->how.front().starts_with("del tuned  # "));
  device.referrers.front().variable =
      "dict 'first.optimizer.state' in main (stages.py:20)";  // of an object that has both
  CHECK(find_reason({.device = device, .growths = {}})->kept_by == "variable 'first' in main (stages.py:20)");
  device.referrers.front().variable = "dict 'model._parameters' in main (stages.py:20)";
  device.referrers.front().born = 9;  // the model of now
  CHECK(find_reason({.device = device, .growths = {}})->kept_by.empty());
}

TEST_CASE("a cache of a function's results is named where it keeps models", "[explain][reasons]") {
  LiveBlock weight = parameter("0.weight", true);
  weight.bytes = 50_MiB;
  DeviceHistory device = at_oom({weight, weight});
  device.referrers = {{.variable = "lru_cache of 'load' in train.py"}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "several_models");
  CHECK(reason->how.front().find("cache_clear()") != std::string::npos);
}

TEST_CASE("of a model that is gone no shape is known, and its parameters are twins all the same",
          "[explain][reasons]") {
  LiveBlock now = parameter("layers.0.weight", true), gone = parameter("layers.0.weight", true);
  now.bytes = gone.bytes = now.requested_bytes = gone.requested_bytes = 100_MiB;
  gone.shape = {};
  const auto reason = find_several_models({.device = at_oom({now, gone}), .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text.starts_with("2 models with layers of the same names are alive"));
  CHECK(reason->piles_up);
}

TEST_CASE("the list that has several models is named", "[explain][reasons]") {
  LiveBlock weight = parameter("layers.0.weight", true);
  weight.bytes = weight.requested_bytes = 100_MiB;
  weight.made = {.op = "aten::to", .source = "folds.py:30"};
  DeviceHistory device = at_oom({weight, weight});
  device.referrers.assign(
      2, {.variable = "dict 'models[*]._parameters' in folds.py", .made = weight.made, .storage_bytes = 100_MiB});
  const auto reason = find_several_models({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->kept_by == "list 'models'");
  CHECK(reason->how.front().starts_with("models.append(model.cpu())"));
  device.referrers.assign(2, {.variable = "defaultdict 'runs[\"vgg\"][\"optimizer\"].state' in main (sweep.py:3)",
                              .made = weight.made,
                              .storage_bytes = 100_MiB});
  const auto of_dict = find_several_models({.device = device, .growths = {}});
  REQUIRE(of_dict);
  CHECK(of_dict->kept_by == "dict 'runs'");
  CHECK(of_dict->how.front().starts_with("runs[key] = None"));
}

TEST_CASE("while a model is made, the variable of the one before is to let go of it, and no batch matters",
          "[explain][reasons]") {
  LiveBlock weight = parameter("layers.0.weight", false);
  weight.bytes = weight.requested_bytes = 300_MiB;
  weight.made = {.op = "aten::empty", .source = "notebook.py:7"};
  DeviceHistory device = at_oom({weight, weight});
  device.failure->where = weight.made;
  device.referrers = {
      {.variable = "dict 'kernel.globals[\"model\"]._parameters' in main (kernel.py:3)", .made = weight.made}};
  const auto reason = find_model_being_made({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->how.front().starts_with("kernel.globals[\"model\"] = None  # before the next one is made"));
  CHECK(reason->of_any_batch);
  device.referrers.front().variable = "dict 'net._parameters' in main (kernel.py:3)";
  const auto of_variable = find_model_being_made({.device = device, .growths = {}});
  REQUIRE(of_variable);
  CHECK(of_variable->how.front().starts_with("del net  # before"));
}

}  // namespace oomdiag
