#include "profiler/export/owner_tree.h"
#include "tests/catch.h"

using namespace oomdiag;

TEST_CASE("a node of 100 000 children takes each in at once", "[export]") {
  constexpr int kChildren = 100'000;
  OwnerTree tree;
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < kChildren; ++i) {
      tree.add(std::vector{std::string("output"), "layer" + std::to_string(i)}, i < 2 ? 1'000'000 : 1, 1);
    }
  }
  const OwnerNode root = std::move(tree).finish();  // 2 ∙ 10¹⁰ comparisons of names else: a minute
  REQUIRE(root.children.size() == 1);
  REQUIRE(root.children[0].children.size() == 3);
  CHECK(root.children[0].children[0] == OwnerNode{.name = "layer0", .bytes = 2'000'000, .blocks = 2});
  CHECK(root.children[0].children[2].blocks == 2 * (kChildren - 2));
}
