#include "cli/experiments/complete.h"
#include "cli/experiments/fix.h"
#include "cli/launch/steady.h"
#include "cli/reports/reports.h"
#include "profiler/explain/findings.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/report/report.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

namespace oomdiag {
namespace {

MeasuredFix measured(const std::string& id, int64_t peak_bytes, FixCost cost = {}, const std::string& group = "") {
  MeasuredFix one{.changes = {{.id = id, .group = group.empty() ? id : group, .label = id, .cost = cost}}};
  one.measured_peak_bytes = peak_bytes;
  return one;
}

std::vector<std::string> ids_of(const std::vector<Change>& changes) {
  std::vector<std::string> ids;
  for (const Change& change : changes) ids.push_back(change.id);
  return ids;
}

}  // namespace

TEST_CASE("changes are combined where the product of what they leave should fit, cheapest first", "[cli]") {
  const Before before{.allocated_bytes = 1000, .available_bytes = 330};
  const auto together =
      combine({measured("a", 600), measured("b", 500, FixCost::recomputation), measured("c", 800)}, before);
  REQUIRE(together.size() == 2);
  CHECK(ids_of(together[0]) == std::vector<std::string>{"a", "b"});
  CHECK(ids_of(together[1]) == std::vector<std::string>{"a", "b", "c"});
}

TEST_CASE("changes that exclude each other, save nothing or were not proved are not combined", "[cli]") {
  const Before before{.allocated_bytes = 1000, .available_bytes = 400};
  MeasuredFix unproved = measured("x", 0);
  unproved.measured_peak_bytes.reset();
  CHECK(combine({measured("a", 600, {}, "g"), measured("b", 600, {}, "g"), measured("c", 999), unproved}, before)
            .empty());
}

TEST_CASE("what would fit but for fragmentation is tried with expandable segments", "[cli]") {
  const auto together = combine({measured("a", 300)}, {.allocated_bytes = 1000, .available_bytes = 400});
  REQUIRE(together.size() == 1);
  CHECK(ids_of(together[0]) == std::vector<std::string>{"a", "expandable_segments"});
}

TEST_CASE("as few blocks are checkpointed as should do, those first that keep most for each op that runs again",
          "[cli]") {
  ProgramProfile profile{.leaves = 10};
  for (const auto& [path, leaves] : {std::pair("a.0", 4), {"a.1", 2}, {"b.0", 2}}) {
    profile.blocks.push_back({.container = std::string(path, 1), .path = path, .leaves = leaves});
  }
  const Report whole{.devices = {{.saved_tensors = {{.bytes = 100, .saved_by_modules = {"a.0.conv"}},
                                                    {.bytes = 80, .saved_by_modules = {"a.1", "a.10"}},
                                                    {.bytes = 20, .saved_by_modules = {"b.0"}}}}}};
  weigh_blocks(profile, whole);
  const Change all = checkpoint_blocks(profile, 3);
  CHECK(all.label == "checkpoint a.*, b.*");
  CHECK(all.settings["blocks"] == nlohmann::json::parse(R"(["a.0", "a.1", "b.0"])"));
  const Change two = checkpoint_blocks(profile, 2);
  CHECK(two.label == "checkpoint 2 of 3 blocks");
  CHECK(two.settings["blocks"] == nlohmann::json::parse(R"(["a.0", "a.1"])"));
  CHECK(checkpoint_blocks(profile, 1).settings["blocks"] == nlohmann::json::parse(R"(["a.1"])"));
  CHECK_FALSE(two.recomputed_ops);
  profile.blocks[0].ops = 10, profile.blocks[1].ops = 30, profile.blocks[2].ops = 5;
  CHECK(checkpoint_blocks(profile, 1).settings["blocks"] == nlohmann::json::parse(R"(["a.0"])"));
  CHECK(checkpoint_blocks(profile, 3).recomputed_ops == 45);
  profile.blocks[0].ops = profile.blocks[1].ops = profile.blocks[2].ops = 0;
  CHECK(fewest_checkpoints(profile, 1000, 400, 800) == 1);
  CHECK(fewest_checkpoints(profile, 1000, 400, 700) == 2);
  CHECK(fewest_checkpoints(profile, 1000, 400, 410) == 3);
}

TEST_CASE("outputs of a job are compared rank by rank, in whatever order its processes report", "[cli]") {
  const auto line = [](int rank, int rows) { return nlohmann::json{{"output", {rows, 2}}, {"rank", rank}}; };
  const auto outputs = [](const std::vector<nlohmann::json>& lines) { return read_profile(lines).outputs; };
  const auto before = outputs({line(0, 8), line(1, 16), line(0, 8)});
  CHECK(same_outputs(outputs({line(1, 16), line(0, 8)}), before));
  CHECK_FALSE(same_outputs(outputs({line(1, 8), line(0, 8)}), before));
}

TEST_CASE("the cure of the reason stands first among what fits, however long its step seems", "[cli]") {
  Before before{.step = {.time_ns = 100}, .reason = Reason{.fix = "fused_or_single"}};
  std::vector<MeasuredFix> fixes{measured("autocast_bf16", 500), measured("fused_optimizer", 900), measured("sgd", 10)};
  for (MeasuredFix& one : fixes) one.fits = one.changes[0].id != "sgd";
  fixes[0].step.time_ns = 50, fixes[1].step.time_ns = 300;
  sort_fixes(fixes, before, {});
  CHECK(fixes[0].changes[0].id == "fused_optimizer");
  CHECK(fixes[1].changes[0].id == "autocast_bf16");
  CHECK(fixes[2].changes[0].id == "sgd");
}

TEST_CASE("what a report offers and nobody ran is listed with the reason", "[cli]") {
  const std::vector<Fix> offered{
      {.id = "fused_or_single", .label = "fused"},
      {.id = "sdpa", .label = "SDPA", .how = {"y = …"}, .predicted_peak_bytes = 7, .at_least = true},
      {.id = "sdpa", .label = "SDPA"},
      {.id = "half_batch", .label = "half the batch"}};
  const std::vector<MeasuredFix> not_run = list_not_run(offered, {measured("fused_optimizer", 1)}, {});
  REQUIRE(not_run.size() == 2);
  CHECK(not_run[0].label() == "SDPA");
  CHECK(not_run[0].lines == std::vector<std::string>{"y = …"});
  CHECK(not_run[0].predicted_at_least());
  CHECK(not_run[0].unproved.find("lines have to be written") != std::string::npos);
  CHECK(not_run[1].unproved.find("--batch N") != std::string::npos);
  const auto in_leak = list_not_run(offered, {}, {.cause = "leak", .grows = true});
  CHECK(in_leak[1].unproved == "not run: in a leak only what stops the growth is a fix");
  CHECK(in_leak[1].lines.empty());
}

TEST_CASE("in a leak only what stops the growth is run", "[cli]") {
  const Before leak{.cause = "leak", .grows = true};
  CHECK_FALSE(why_not_run(change_of("autocast_bf16"), leak).empty());
  CHECK(why_not_run(change_of("collect_garbage"), leak).empty());
  CHECK(why_not_run(change_of("autocast_bf16"), {.cause = "capacity"}).empty());
}

TEST_CASE("a run goes to the step in which the recorded one ran out, or had its peak", "[cli]") {
  Report report{.devices = {{}, {}}};
  report.devices[0].peak.step = 7;
  CHECK(step_to_reach(report) == 0);  // no optimizer: its steps are calls
  for (ReportOfDevice& device : report.devices) device.phases = {{.step = 1, .phase = Phase::optimizer}};
  CHECK(step_to_reach(report) == 7);
  report.devices[1].failure.emplace().step = 5;
  CHECK(step_to_reach(report) == 5);
  CHECK(until_step(5) == SteadyRule{.at_least = 5, .most = kMaxSteps});
  CHECK(until_step(663) == SteadyRule{.at_least = 663, .most = 664});
}

TEST_CASE("a cure that is run as another row keeps its own row in the report", "[cli]") {
  const TestFolder folder;
  Report report{.outcome = "out_of_memory", .devices = {{}}};
  report.devices[0].fixes = {{.id = "fused_or_single", .label = "a fused optimizer"}};
  keep_json(report, folder.path());
  remember({.before = {}, .fixes = {measured("fused_optimizer", 510)}}, "{}", folder.path());
  const std::vector<Fix> fixes = load_report(folder.path()).devices.at(0).fixes;
  REQUIRE(fixes.size() == 1);
  CHECK(fixes[0].measured_peak_bytes == 510);
}

TEST_CASE("shapes are the same where both have them", "[cli]") {
  const auto json = [](const char* text) { return nlohmann::json::parse(text); };
  CHECK(same_shapes(json(R"({"logits": [8, 2], "cache": [[8]]})"), json(R"({"logits": [8, 2]})")));
  CHECK_FALSE(same_shapes(json(R"({"logits": [8, 2]})"), json(R"({"logits": [4, 2]})")));
  CHECK_FALSE(same_shapes(json("[8, 2]"), json("[4, 2]")));
}

TEST_CASE("a profile is of the largest network, and nothing where it cannot be read", "[cli]") {
  const auto line = nlohmann::json::parse(
      R"({"root": {"kind": "Net", "trained": true, "leaves": 4, "blocks": [{"container": "h", "path": "h.0", "leaves": 4}],
          "modules": {"ReLU": 1, "Module": 4}, "bytes_of_float32": 8, "autocast": false}})");
  const ProgramProfile profile = read_profile({line, nlohmann::json::parse(R"({"loader": {"batch_size": 64}})"),
                                               nlohmann::json::parse(R"({"ops": {"path": "h.0", "count": 31}})")});
  CHECK(profile.has_root);
  CHECK(profile.count_modules("ReLU") == 1);
  CHECK(profile.count_modules("Conv2d") == 0);
  CHECK(profile.loader_batch == 64);
  REQUIRE(profile.blocks.size() == 1);
  CHECK(profile.blocks[0].path == "h.0");
  CHECK(profile.blocks[0].ops == 31);
  CHECK(read_profile({nlohmann::json::parse(R"({"root": 3})")}) == ProgramProfile{});
}

TEST_CASE("a change is named, grouped and judged as its row says", "[cli]") {
  const Target target{.batch = 8, .accumulates = true};
  const ProgramProfile profile{.keeps_gradients = true, .has_adam = true, .has_8bit = true};
  const std::vector<Change> changes =
      list_changes(target, profile, {}, {.allocated_bytes = 100, .available_bytes = 100});
  CHECK(ids_of(changes) == std::vector<std::string>{"expandable_segments", "set_to_none", "adam_8bit", "accumulate_2",
                                                    "half_batch", "batch_2"});
  for (const Change& change : changes) {
    const FixRow* const row = find_fix(change.id);
    REQUIRE(row != nullptr);
    CHECK(change.group == row->group);
    CHECK(change.changes_numerics == row->changes_numerics);
    if (!change.batch) CHECK(change.label == row->label);
  }
  CHECK(changes[2].cost == FixCost::less_precise);
  CHECK(changes[3].label == "gradient accumulation, 2 micro-batches");
  CHECK(changes[3].cost == FixCost::smaller_batches);
  CHECK(changes[4].label == "batch 4");
  CHECK(changes[5].label == "batch 2");
}

TEST_CASE("of measured fixes that share an id each keeps its own figure in the report", "[cli]") {
  const TestFolder folder;
  Report report{.outcome = "out_of_memory", .devices = {{}}};
  report.devices[0].fixes = {{.id = "checkpoint", .label = "checkpoint h.*", .predicted_peak_bytes = 500}};
  keep_json(report, folder.path());
  MeasuredFix some = measured("checkpoint", 900), all = measured("checkpoint", 510);
  some.changes[0].label = "checkpoint 6 of 12 blocks";
  all.changes[0].label = "checkpoint h.0 ... h.11";  // called so by the look at the model
  all.changes[0].predicted_peak_bytes = 500;
  for (int run = 0; run < 2; ++run) {
    remember({.before = {}, .fixes = {some, all}}, "{}", folder.path());
    const std::vector<Fix> fixes = load_report(folder.path()).devices.at(0).fixes;
    REQUIRE(fixes.size() == 2);
    CHECK(fixes[0].label == "checkpoint h.*");
    CHECK(fixes[0].measured_peak_bytes == 510);
    CHECK(fixes[1].label == "checkpoint 6 of 12 blocks");
    CHECK(fixes[1].measured_peak_bytes == 900);
  }
}

TEST_CASE("an option is the batch size by its name, however a program writes it", "[cli]") {
  for (const char* const name : {"--batch-size", "-b", "bs", "train.batch_size", "--per_device_train_batch_size"}) {
    CHECK(names_batch(name));
  }
  for (const char* const name : {"--num-batches", "--eval-batch-size", "--epochs", "--test_batch"}) {
    CHECK_FALSE(names_batch(name));
  }
}

TEST_CASE("a batch that the program's parser takes is halved behind its own arguments", "[cli]") {
  const ProgramProfile profile{.batch_option = "--batch-size", .batch_of_option = 6};
  const std::vector<Change> changes = list_changes({}, profile, {}, {.allocated_bytes = 2, .available_bytes = 1});
  REQUIRE(ids_of(changes) == std::vector<std::string>{"half_batch", "batch_1"});
  CHECK(changes[0].added == std::vector<std::string>{"--batch-size", "3"});
  CHECK(changes[0].label == "--batch-size 3");
}

TEST_CASE("the evaluation is the function of the stack that is called so, else the line that calls the model",
          "[cli]") {
  Before before{
      .allocated_bytes = 2,
      .available_bytes = 1,
      .reason = Reason{.id = "evaluation_keeps_graphs", .text = "", .fix = "no_grad_in_evaluation"},
      .stack = {"/home/me/train.py:9 in forward", "/home/me/train.py:30 in _validate", "train.py:40 in main"}};
  const auto cures = [&] { return list_changes({}, {}, {}, before); };
  CHECK(cures().front().settings["function"] == "_validate");
  CHECK(cures().front().cures);
  before.stack = {"/home/me/train.py:9 in <module>"};
  CHECK(cures().front().settings["line"] == "train.py:9");
  before.reason->fix = "load_to_host";
  CHECK(ids_of(cures()) == std::vector<std::string>{"load_to_host"});
  before.reason->fix = "one_graph_pool";
  CHECK(cures().empty());
}

TEST_CASE("an nn.Sequential without blocks is cut into as many parts as a part has layers", "[cli]") {
  const Change change = checkpoint_layers({.leaves = 30, .sequential = "features", .layers = 25});
  CHECK(change.label == "checkpoint features in 5 segments");
  CHECK(change.settings == nlohmann::json::parse(R"({"sequential": "features", "segments": 5})"));
}

TEST_CASE("autocast is not tried where weights and what belongs to them are the peak", "[cli]") {
  const ProgramProfile profile{.bytes_of_float32 = 100, .has_root = true};
  const auto tries_autocast = [&](int64_t activation_bytes) {
    Target target{};
    target.device.gpus.emplace_back().capability.major = 8;
    const Report whole{.devices = {{.categories = {{"parameter", 400}, {"activation", activation_bytes}}}}};
    const auto ids = ids_of(list_changes(target, profile, whole, {.allocated_bytes = 2, .available_bytes = 1}));
    return std::ranges::find(ids, "autocast_bf16") != ids.end();
  };
  CHECK_FALSE(tries_autocast(10));
  CHECK(tries_autocast(400));
}

}  // namespace oomdiag
