#include <set>
#include <string>
#include <thread>
#include <vector>

#include "extension/record/scope_names.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;

TEST_CASE("what a scope's name says is the same however many others are seen in between", "[record]") {
  const TestFolder folder;
  TraceWriter writer(folder.path() / "trace", 1);
  InternCache names(writer);
  NumberedNames numbered;
  ScopeNames scopes;
  for (int round = 0; round < 3; ++round) {
    const ScopeName step = scopes.find("Optimizer.step#SGD.step", numbered, names);
    CHECK(step.id == writer.intern(std::string_view("Optimizer.step#SGD.step")));
    CHECK((step.of_pytorch && step.of_optimizer && step.is_optimizer_step && !step.is_folded()));
    const ScopeName zero = scopes.find("Optimizer.zero_grad#SGD.zero_grad", numbered, names);
    CHECK((zero.of_pytorch && zero.of_optimizer && !zero.is_optimizer_step));
    CHECK_FALSE(scopes.find("request #7", numbered, names).of_pytorch);
    CHECK(scopes.find("ProfilerStep#3", numbered, names).of_profiler);
    for (int i = 0; i < 1000; ++i) {
      const std::string given = "iteration " + std::to_string(i);
      const ScopeName scope = scopes.find(given, numbered, names);
      REQUIRE(scope.given == given);
      REQUIRE(scope.canonical == numbered.canonical_name(given));
      REQUIRE(scope.id == writer.intern(std::string_view(scope.canonical)));
    }
    CHECK(scopes.find("iteration 999", numbered, names).is_folded());
  }
}

TEST_CASE("the layers of a model keep their numbers", "[record]") {
  NumberedNames names;
  for (int layer = 0; layer < 96; ++layer) {
    const std::string name = "block " + std::to_string(layer) + ".attention";
    CHECK(names.canonical_name(name) == name);
  }
  CHECK(names.canonical_name("loss") == "loss");
}

TEST_CASE("numbered steps are recorded as one once there are too many of them, the first ones still by themselves",
          "[record]") {
  NumberedNames names;
  std::set<std::string> names_used;
  for (int step = 0; step < 10'000; ++step)
    names_used.emplace(names.canonical_name("iteration " + std::to_string(step)));
  CHECK(names_used.size() == NumberedNames::kMaxOfOneForm + 1);
  CHECK(names.canonical_name("iteration 9999") == "iteration #");
  CHECK(names.canonical_name("iteration 7") == "iteration 7");
  CHECK(names.canonical_name("epoch 3, batch 17 of 500") == "epoch 3, batch 17 of 500");
}

TEST_CASE("names that differ by more than numbers have a bound of their own", "[record]") {
  NumberedNames names;
  std::set<std::string> names_used;
  std::string letters;
  for (size_t i = 0; i < 2 * NumberedNames::kMaxForms; ++i) {
    letters = std::string(1 + i % 90, static_cast<char>('a' + i / 90 % 26)) + std::string(1 + i / 2340, 'z') + "1";
    names_used.emplace(names.canonical_name(letters));
  }
  CHECK(names_used.size() <= NumberedNames::kMaxForms + 1);
}

TEST_CASE("threads may ask at the same time", "[record]") {
  NumberedNames names;
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) names.canonical_name("step " + std::to_string(i));
    });
  }
  threads.clear();
  CHECK(names.canonical_name("step 5000") == "step #");
}
