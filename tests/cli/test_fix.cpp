#include "cli/fix.h"
#include "tests/catch.h"

namespace oomdiag {
namespace {

Remedied measured(const std::string& id, int64_t peak_bytes, int cost = 0, const std::string& group = "") {
  Remedied one{.changes = {{.id = id, .group = group.empty() ? id : group, .label = id, .cost = cost}}};
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
  const Before before{.allocated_bytes = 1000, .room_bytes = 330};
  const auto together = combine({measured("a", 600), measured("b", 500, 2), measured("c", 800)}, before);
  REQUIRE(together.size() == 2);
  CHECK(ids_of(together[0]) == std::vector<std::string>{"a", "b"});
  CHECK(ids_of(together[1]) == std::vector<std::string>{"a", "b", "c"});
}

TEST_CASE("changes that exclude each other, save nothing or were not proved are not combined", "[cli]") {
  const Before before{.allocated_bytes = 1000, .room_bytes = 400};
  Remedied unproved = measured("x", 0);
  unproved.measured_peak_bytes.reset();
  CHECK(
      combine({measured("a", 600, 0, "g"), measured("b", 600, 0, "g"), measured("c", 999), unproved}, before).empty());
}

TEST_CASE("what would fit but for holes is tried with expandable segments", "[cli]") {
  const auto together = combine({measured("a", 300)}, {.allocated_bytes = 1000, .room_bytes = 400});
  REQUIRE(together.size() == 1);
  CHECK(ids_of(together[0]) == std::vector<std::string>{"a", "expandable_segments"});
}

TEST_CASE("as few blocks are checkpointed as should do", "[cli]") {
  const Look look{.containers = {{.path = "h", .count = 12, .leaves = 120}}, .leaves = 130};
  const Change all = checkpoint_parts(look, 12);
  CHECK(all.label == "checkpoint h.*");
  const auto fewer = checkpoint_fewer(all, look, 1000, 400, 800);
  REQUIRE(fewer);
  CHECK(fewer->settings["parts"] == nlohmann::json::parse(R"([["h", 5]])"));
  CHECK(fewer->label == "checkpoint 5 of 12 blocks");
  CHECK_FALSE(checkpoint_fewer(all, look, 1000, 400, 400));
}

TEST_CASE("a look tells of the largest network, and nothing where it cannot be read", "[cli]") {
  const auto line = nlohmann::json::parse(
      R"({"root": {"kind": "Net", "trained": true, "leaves": 4, "containers": [{"path": "h", "count": 2, "leaves": 4}],
          "relus": 1, "convolutions": 0, "bytes_of_float32": 8, "autocast": false}})");
  const Look look = read_look({line, nlohmann::json::parse(R"({"loader": {"batch_size": 64}})")});
  CHECK(look.has_root);
  CHECK(look.loader_batch == 64);
  REQUIRE(look.containers.size() == 1);
  CHECK(look.containers[0].path == "h");
  CHECK(read_look({nlohmann::json::parse(R"({"root": 3})")}) == Look{});
}

}  // namespace oomdiag
