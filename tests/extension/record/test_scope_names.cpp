#include <string>

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
