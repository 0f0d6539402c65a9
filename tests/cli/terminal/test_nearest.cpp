#include "cli/terminal/nearest.h"
#include "tests/catch.h"

using namespace oomdiag;
using Names = std::vector<std::string>;

TEST_CASE("an edit is an insertion, a deletion, a replacement or a swap", "[cli]") {
  CHECK(edit_distance("", "") == 0);
  CHECK(edit_distance("train", "train") == 0);
  CHECK(edit_distance("trian", "train") == 1);
  CHECK(edit_distance("tran", "train") == 1);
  CHECK(edit_distance("trrain", "train") == 1);
  CHECK(edit_distance("brain", "train") == 1);
  CHECK(edit_distance("", "train") == 5);
}

TEST_CASE("the nearest names come first, and at most three", "[cli]") {
  const Names gpus{"t4", "a10g", "a100-40", "a100-80", "rtx3060", "rtx3090", "rtx4090", "h100-sxm"};

  CHECK(nearest("rtx3061", gpus) == Names{"rtx3060", "rtx3090"});
  CHECK(nearest("RTX 3060", gpus).front() == "rtx3060");
  CHECK(nearest("3060ti", gpus) == Names{"rtx3060"});
  CHECK(nearest("a10", gpus) == Names{"a10g", "a100-40", "a100-80"});
  CHECK(nearest("h100", gpus) == Names{"h100-sxm"});
  CHECK(nearest("banana", gpus).empty());
}

TEST_CASE("a hint names the nearest, and always the way to all", "[cli]") {
  CHECK(did_you_mean("trian", {"train", "run"}, "see --help") == "did you mean train? see --help");
  CHECK(did_you_mean("xyzzy", {"train", "run"}, "see --help") == "see --help");
}
