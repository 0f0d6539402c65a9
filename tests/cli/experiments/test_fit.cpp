#include "cli/experiments/fit.h"
#include "cli/experiments/fit_gpus.h"
#include "cli/experiments/fit_lengths.h"
#include "cli/experiments/fit_text.h"
#include "cli/terminal/terminal.h"
#include "profiler/error.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

namespace oomdiag {

TEST_CASE("what varies is a range, with steps or doublings, or a list", "[cli]") {
  const Variable range = parse_variable("batch=1..65536");
  CHECK(range.name == "batch");
  CHECK(range.count() == 65536);
  CHECK(range.value(0) == 1);
  CHECK(range.value(65535) == 65536);

  const Variable steps = parse_variable("seq=8..100:8");
  CHECK(steps.count() == 12);
  CHECK(steps.value(11) == 96);

  const Variable doublings = parse_variable("batch=3..100:pow2");
  CHECK(doublings.count() == 6);
  CHECK(doublings.value(5) == 96);

  const Variable list = parse_variable("seq=512,128,256,128");
  CHECK(list.list == std::vector<int64_t>{128, 256, 512});
}

TEST_CASE("what is no range and no list is rejected", "[cli]") {
  for (const char* text : {"", "batch", "batch=", "=1..2", "batch=2..1", "batch=0..4", "batch=1..x", "batch=1..8:0",
                           "batch=1,,2", "batch=1..2,3", "batch=10..1", "batch=1..9999999999999"}) {
    CHECK_THROWS_AS(parse_variable(text), Error);
  }
}

TEST_CASE("what fails below the border and what fails above it is said", "[cli]") {
  const Variable variable{.name = "batch", .least = 1, .most = 99};
  FitOfGpu found{.gpu = "t4", .largest = {{.others = {}, .value = 22, .failed_above = {23}}}, .runs = {}};
  for (const auto& [batch, outcome] : {std::pair(22, "ok"), {21, "out_of_memory"}, {23, "out_of_memory"}}) {
    found.runs.push_back(
        {.values = {{"batch", batch}}, .experiment = {.outcome = outcome, .place = "backward, step 1"}});
  }
  const std::string text = values_text(variable, {found});
  CHECK(text.find("fits up to batch = 22\n") != text.npos);
  CHECK(text.find("23 runs out of memory in backward, step 1\n") != text.npos);
  CHECK(text.find("smaller ones ran out as well, as fragmentation decides there: 21\n") != text.npos);
}

namespace {

FitRun run_of(int64_t batch, int64_t allocated_bytes, int64_t reserved_bytes) {
  return {.values = {{"batch", batch}},
          .experiment = {.outcome = "ok",
                         .allocated_bytes = allocated_bytes,
                         .reserved_bytes = reserved_bytes,
                         .total_bytes = 8_GiB,
                         .needed_bytes = reserved_bytes},
          .gpu_bytes = 8_GiB};
}

FitRun learning_run(int64_t batch, int64_t allocated_bytes, int64_t reserved_bytes) {
  FitRun run = run_of(batch, allocated_bytes, reserved_bytes);
  run.memory_bytes = run.experiment.total_bytes = 1_GiB << 14;
  run.learns = true;
  return run;
}

std::string text_of(const FitRun& run) {
  const Variable variable{.name = "batch", .least = 1, .most = 99};
  return values_text(variable, {{.gpu = "t4", .largest = {{.others = {}, .value = 22}}, .runs = {run}}});
}

}  // namespace

TEST_CASE("a run with more memory shows by its own bytes what it would do on the GPU", "[cli]") {
  CHECK(fits(learning_run(1, 2_GiB, 3_GiB)) == Fits::yes);
  CHECK(fits(learning_run(1, 7_GiB, 9_GiB)) == Fits::unknown);
  CHECK(fits(learning_run(1, 9_GiB, 9_GiB)) == Fits::no);
  const std::string text = interrupted_text({learning_run(3, 2_GiB, 3_GiB), learning_run(17, 9_GiB, 9_GiB)});
  CHECK(text.find("batch = 3                    fits, 2.00 GiB allocated\n") != text.npos);
  CHECK(text.find("batch = 17                   does not fit: 9.00 GiB allocated of 8.00 GiB\n") != text.npos);
  CHECK(text.find("all measured") == text.npos);
}

TEST_CASE("a run that was ended is no whole run, and says how far it went", "[cli]") {
  FitRun run = run_of(22, 2_GiB, 3_GiB);
  CHECK(text_of(run).find("measured: a whole run\n") != std::string::npos);
  run.experiment.stopped_at_step = 12;
  CHECK(text_of(run).find(
            "it was run as far as step 12; what comes later, as a validation, was not seen: --steps all\n") !=
        std::string::npos);
  run.goes_on = true;
  CHECK(text_of(run).find("as far as step 12 in the 60 s that it was given;") != std::string::npos);
  CHECK(text_of(run).find("measured: a whole run") == std::string::npos);
}

TEST_CASE("what grows from step to step fits to its end only", "[cli]") {
  FitRun run = run_of(22, 2_GiB, 3_GiB);
  run.experiment.growth_bytes = 2_MiB;
  CHECK(text_of(run).starts_with("oomdiag: it grows by 2.00 MiB per step; to its end it passes up to batch = 22\n"));
}

TEST_CASE("one run is one run", "[cli]") {
  CHECK(count_runs({FitRun{}}) == "1 run, all measured");
  CHECK(count_runs({FitRun{}, FitRun{}}) == "2 runs, all measured");
}

TEST_CASE("every placeholder of a program is filled in, also inside of words", "[cli]") {
  CHECK(fill_in({"train", "--batch={batch}", "{seq}x{seq}"}, {{"batch", 8}, {"seq", 128}}) ==
        std::vector<std::string>{"train", "--batch=8", "128x128"});
}

TEST_CASE("each loader makes batches of its next longer sample, or of its longest", "[cli]") {
  Lengths lengths;
  lengths.loaders = {{{16, 3}, {40, 7}, {95, 0}}, {}, {{24, 1}}};
  const auto samples_at = [&](int64_t length) { return lengths.batches_of(length).at(0).at(1).at("samples"); };
  CHECK(samples_at(40) == nlohmann::json{7, -1, 1});
  CHECK(samples_at(41) == nlohmann::json{0, -1, 1});
  CHECK(samples_at(96) == nlohmann::json{0, -1, 1});
}

TEST_CASE("a data set that was not gone through to its end is said to be known in part", "[cli]") {
  const Lengths lengths{.distinct = {16, 95}, .samples = 300, .of_samples = 4000};
  CHECK(lengths_text(lengths, {}, {}).find("the first 300 of 4000 samples of 16 to 95") != std::string::npos);
}

TEST_CASE("the smallest card has what is needed beside its own context", "[cli]") {
  const auto gpu = [](const char* id, int64_t total_bytes, int64_t context_bytes) {
    GpuEntry entry;
    entry.id = id;
    entry.total_bytes = total_bytes;
    entry.context_bytes = context_bytes;
    return entry;
  };
  const GpuEntry h200 = gpu("h200", 140_GiB, 600_MiB);
  const std::vector<GpuEntry> gpus{gpu("small", 4_GiB, 200_MiB), gpu("middle", 8_GiB, 300_MiB), h200};
  CHECK(find_card(gpus, h200, 4_GiB + 400_MiB)->id == "small");
  CHECK(find_card(gpus, h200, 4_GiB + 402_MiB)->id == "middle");
  CHECK_FALSE(find_card(gpus, h200, 141_GiB).has_value());
  const std::string text = gpu_text({.bytes = 5_GiB, .card = gpus[1]}, {});
  CHECK(text.starts_with("oomdiag: fits on middle, 8.00 GiB (an estimate); needs 5.00 GiB\n"));
}

TEST_CASE("a table names its columns, and marks the end of a range", "[cli]") {
  const Variable variable{.name = "batch", .least = 1, .most = 99};
  const std::string text = values_text(
      variable, {{.gpu = "t4",
                  .largest = {{.others = {{"seq", 64}}, .value = 99, .is_last_of_range = true, .computed_bytes = 1_GiB},
                              {.others = {{"seq", 128}}}},
                  .runs = {}}});
  CHECK(text.find("  GPU                with                    batch  GiB allocated\n") != text.npos);
  CHECK(text.find("      99           1.00   computed; the end of the range\n") != text.npos);
  CHECK(text.find("    none\n") != text.npos);
}

TEST_CASE("what is left is said only where it is known how many runs there are", "[cli]") {
  CHECK(steps_text("fit", 3, 0, 42) == "fit: 3 runs so far, 42 s");
  CHECK(steps_text("ranks", 1, 8, 10) == "ranks: 1 of about 8 runs, 70 s left");
}

}  // namespace oomdiag
