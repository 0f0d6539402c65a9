#include "profiler/explain/facts/common_referrers.h"
#include "profiler/explain/facts/variable_counts.h"
#include "tests/catch.h"

namespace oomdiag {

TEST_CASE("items of a container count as one variable, and a single one keeps its index", "[explain]") {
  VariableCounts counts;
  CHECK(counts.most().empty());
  counts.add("variable 'x' in f", 1);
  counts.add("list 'a[0].b' in f", 1);
  CHECK(counts.most() == "variable 'x' in f");  // the first of several
  counts.add("list 'a[0].b' in f", 1);
  CHECK(counts.most() == "list 'a[0].b' in f");
  counts.add("list 'a[1].b' in f", 1);
  CHECK(counts.most() == "list 'a[*].b' in f");
}

TEST_CASE("many keys of a dictionary count as one variable, and names of modules or fields do not", "[explain]") {
  VariableCounts sessions, fields, modules;
  for (int i = 0; i < 20; ++i) {
    const std::string name = "anna" + std::to_string(i);
    sessions.add("attribute 'sessions[\"" + name + "\"].layers[0].keys' in f", 1);
    sessions.add("attribute 'sessions[\"" + name + "\"].layers[1].keys' in f", 1);
    fields.add(i % 2 == 0 ? "list 'log[\"loss\"]' in f" : "list 'log[\"accuracy\"]' in f", 1);
    modules.add("dict 'net._modules[\"" + name + "\"]._parameters' in f", 1);
  }
  CHECK(sessions.most() == "attribute 'sessions[\"*\"].layers[*].keys' in f");
  CHECK(sessions.count_of_most() == 40);
  CHECK(fields.most() == "list 'log[\"loss\"]' in f");
  CHECK(modules.count_of_most() == 1);
}

TEST_CASE("equal tensors of one line are kept by the variable that has most of them", "[explain]") {
  const Where made{.op = "aten::relu", .source = "a.py:3"};
  std::vector<Referrer> referrers{{.variable = "variable 'y' in f", .made = made, .storage_bytes = 512}};
  for (int i = 0; i < 3; ++i)
    referrers.push_back({.variable = "list 'results' in f", .made = made, .storage_bytes = 512});
  const CommonReferrers common(referrers);
  const Referrer* const found = common.find({.requested_bytes = 512, .made = made});
  REQUIRE(found != nullptr);
  CHECK(found->variable == "list 'results' in f");
  CHECK(common.find({.requested_bytes = 1024, .made = made}) == nullptr);
}

}  // namespace oomdiag
