#include "cli/experiments/fit_plan.h"
#include "cli/experiments/run_ranks.h"
#include "cli/launch/ranks.h"
#include "profiler/error.h"
#include "tests/catch.h"

using namespace oomdiag;

namespace {

std::vector<int> ranks_of(const std::vector<RankKind>& kinds) {
  std::vector<int> ranks;
  for (const RankKind& kind : kinds) ranks.push_back(kind.rank);
  return ranks;
}

}  // namespace

TEST_CASE("a host has eight GPUs unless somebody says otherwise", "[ranks]") {
  CHECK(choose_job({.world_size = 64, .rank = 5}, 0) ==
        Job{.world_size = 64, .local_world_size = 8, .ranks = {5}, .is_distinct = false});
  CHECK(choose_job({.world_size = 64, .ranks = "63,0,7,7"}, 4) ==
        Job{.world_size = 64, .local_world_size = 4, .ranks = {0, 7, 63}, .is_distinct = false});
  CHECK(choose_job({.world_size = 2}, 1).local_world_size == 2);
  CHECK(choose_job({}, 4) == Job{});
}

TEST_CASE("ranks that are not in the job are rejected", "[ranks]") {
  CHECK_THROWS_AS(choose_job({.world_size = 4, .rank = 4}, 1), Error);
  CHECK_THROWS_AS(choose_job({.world_size = 4, .ranks = "0,-1"}, 1), Error);
  CHECK_THROWS_AS(choose_job({.rank = 0}, 1), Error);
  CHECK_THROWS_AS(choose_job({.world_size = 4, .rank = 1, .ranks = "1"}, 1), Error);
}

TEST_CASE("without a pipeline the first and the last rank differ", "[ranks]") {
  CHECK(find_kinds(64, {}) == std::vector<RankKind>{{0, "0-63 but 63"}, {63, ""}});
  CHECK(ranks_of(find_kinds(1, {})) == std::vector<int>{0});
}

TEST_CASE("of a pipeline each stage is a kind, wherever its ranks lie", "[ranks]") {
  CHECK(ranks_of(find_kinds(8, {0, 4})) == std::vector<int>{0, 3, 4, 7});
  CHECK(ranks_of(find_kinds(8, {0, 1})) == std::vector<int>{0, 6, 1, 7});
  CHECK(ranks_of(find_kinds(4, {0, 1, 2, 3})) == std::vector<int>{0, 1, 2, 3});
  CHECK(find_kinds(8, {0, 4}).front().stands_for == "0-3 but 3");
}

TEST_CASE("plans are every combination, as far as that can be run", "[ranks]") {
  const auto plans = list_plans({parse_variable("world=8..16"), parse_variable("tp=1,2")});
  CHECK(plans.plans == std::vector<Values>{{{"tp", 1}, {"world", 8}},
                                           {{"tp", 2}, {"world", 8}},
                                           {{"tp", 1}, {"world", 16}},
                                           {{"tp", 2}, {"world", 16}}});
  CHECK_FALSE(plans.searched);
  CHECK_THROWS_AS(list_plans({parse_variable("world=8..16"), parse_variable("tp=1..1024")}), Error);
}

TEST_CASE("a range before the world is searched in each plan", "[ranks]") {
  const auto planning =
      list_plans({parse_variable("batch=1..64"), parse_variable("world=8"), parse_variable("tp=1,2")});
  CHECK(planning.searched == parse_variable("batch=1..64"));
  CHECK(planning.plans == std::vector<Values>{{{"tp", 1}, {"world", 8}}, {{"tp", 2}, {"world", 8}}});
  const Plan small{.values = {{"batch", 3}, {"world", 8}}, .outcome = "ok", .allocated_bytes = 1};
  const Plan large{.values = {{"batch", 5}, {"world", 16}}, .outcome = "ok", .allocated_bytes = 2};
  CHECK(best_plan({small, large}, "batch")->values == large.values);
  CHECK(best_plan({small, large})->values == small.values);
  CHECK(
      plans_text({small, large}, "batch").starts_with("oomdiag: the largest batch that fits: world = 16, batch = 5\n"));
}

TEST_CASE("the best plan has the smallest world, and of these the lowest peak", "[ranks]") {
  const auto plan = [](int64_t world, int64_t tp, const char* outcome, int64_t bytes) {
    return Plan{.values = {{"world", world}, {"tp", tp}}, .outcome = outcome, .allocated_bytes = bytes};
  };
  const std::vector<Plan> plans{plan(8, 1, "out_of_memory", 9), plan(16, 1, "ok", 8), plan(16, 2, "ok", 7),
                                plan(32, 1, "ok", 1)};
  REQUIRE(best_plan(plans) != nullptr);
  CHECK(*best_plan(plans) == plans[2]);
  CHECK(best_plan({plans[0]}) == nullptr);
}

TEST_CASE("the fastest plan is that whose GPUs compute most in a second, among those that fit", "[ranks]") {
  const auto plan = [](int64_t tp, const char* outcome, std::optional<int64_t> step_ns, int64_t flops) {
    return Plan{.values = {{"world", 8}, {"tp", tp}}, .outcome = outcome, .step_ns = step_ns, .flops = flops};
  };
  const std::vector<Plan> plans{plan(1, "out_of_memory", 10, 1000), plan(2, "ok", 1'000'000, 800'000'000),
                                plan(4, "ok", 500'000, 450'000'000), plan(8, "ok", std::nullopt, 900'000'000)};
  REQUIRE(fastest_plan(plans) != nullptr);
  CHECK(*fastest_plan(plans) == plans[2]);
  CHECK(plans_text(plans).find("most work of a GPU per second: world = 8, tp = 4, 0.9 TFLOP/s (modelled)") !=
        std::string::npos);
}

TEST_CASE("jobs are commands that a shell takes", "[ranks]") {
  const FitRequest request{.program = {"python", "my train.py", "--tp={tp}"}};
  CHECK(print_jobs({{{"tp", 2}, {"world", 16}}}, request, {"--device", "h200"}, "plans") ==
        "mkdir -p plans && oomdiag run --device h200 --world-size 16 --ranks distinct --meter --no-progress --folder "
        "plans "
        "-o plans/tp=2,world=16.json -- python 'my train.py' --tp=2\n");
  const std::string quoted = print_jobs({{{"world", 16}}}, request, {"--device", "my gpus/$c.json"}, "a plan");
  CHECK(quoted.starts_with("mkdir -p 'a plan' && oomdiag run --device 'my gpus/$c.json' --world-size 16 "));
}

TEST_CASE("a topology names GPUs, links between them and between hosts", "[ranks]") {
  CHECK(read_topology("8xh100-nvlink,ib") == TopologyChoice{.gpus = 8, .gpu = "h100", .links = "nvlink,rdma"});
  CHECK(read_topology("4x-pcie,tcp") == TopologyChoice{.gpus = 4, .links = "pcie,tcp"});
  CHECK(read_topology("rtx6000-ada-pcie") == TopologyChoice{.gpu = "rtx6000-ada", .links = "pcie"});
  CHECK(read_topology(",efa") == TopologyChoice{.links = ",rdma"});
  for (const char* text : {"", "8x", "h100", "nvlink,pigeon", "8xh100-nvlink,ib,ib", "0xh100-nvlink"})
    CHECK_THROWS_AS(read_topology(text), Error);
}

TEST_CASE("a job is on the hosts of its topology", "[ranks]") {
  const Job job = choose_job({.world_size = 64, .rank = 5, .topology = "4xh200-nvlink,ib"}, 0);
  CHECK(job.local_world_size == 4);
  CHECK(device_of(job, {}).device == "h200");
  CHECK_THROWS_AS(device_of(job, {.device = "a100"}), Error);
  CHECK_THROWS_AS(choose_job({.topology = "nvlink"}, 1), Error);
}
