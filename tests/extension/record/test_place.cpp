#include <array>

#include "extension/record/intern_cache.h"
#include "extension/record/place.h"
#include "extension/record/scope_path.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;

namespace {

struct PlaceRecording {
  TestFolder folder;
  TraceWriter writer{folder.path() / "trace", 1};
  InternCache names{writer};
  Place place;

  /// An op, as the callback of its start reports it.
  void enter_op(const void* call, uint32_t op) {
    Frame& frame = place.enter(call);
    WorkPlace& now = place.change();
    frame.is_outermost = now.context.op == 0;
    if (frame.is_outermost) now.call_id = op * 10;
    if (frame.is_outermost) now.context.op = op;
    now.context.inner = op;
    now.context_id = names.context(now.context);
  }
  void enter_scope(const void* call, uint32_t scope) {
    place.enter(call).scope_name = scope;
    place.change().context.module = scope;
    place.change().context_id = names.context(place.now().context);
  }
  bool leave(const void* call) {
    Frame ended;
    return place.leave(call, names, ended);
  }
};

const std::array<char, 8> calls{};  // what frames are of

}  // namespace

TEST_CASE("a thread is back where it was when all that it entered has ended", "[record]") {
  PlaceRecording here;
  here.enter_scope(&calls[0], 3);
  here.enter_op(&calls[1], 1);
  here.enter_op(&calls[2], 2);
  CHECK(here.place.now().context == Context{.op = 1, .inner = 2, .module = 3});
  CHECK(here.place.now().call_id == 10);
  CHECK(here.leave(&calls[2]));
  CHECK(here.place.now().context == Context{.op = 1, .inner = 1, .module = 3});
  CHECK(here.leave(&calls[1]));
  CHECK(here.leave(&calls[0]));
  CHECK(here.place.now().context == Context{});
  CHECK(here.place.now().call_id == 0);
  CHECK(here.place.innermost() == nullptr);
}

TEST_CASE("a call that was not entered ends nothing", "[record]") {
  PlaceRecording here;
  here.enter_op(&calls[0], 1);
  CHECK_FALSE(here.leave(&calls[5]));
  CHECK(here.place.now().context.op == 1);
}

TEST_CASE("an op that ends before the scopes that it opened leaves them open, and outside of it", "[record]") {
  PlaceRecording here;
  here.enter_op(&calls[0], 1);
  here.enter_scope(&calls[1], 5);
  CHECK(here.leave(&calls[0]));
  CHECK(here.place.now().context == Context{.module = 5});
  CHECK(here.place.now().call_id == 0);
  CHECK(here.leave(&calls[1]));
  CHECK(here.place.now().context == Context{});
  CHECK(here.place.innermost() == nullptr);
}

TEST_CASE("a scope that ends before the op inside of it leaves the op", "[record]") {
  PlaceRecording here;
  here.enter_scope(&calls[0], 5);
  here.enter_op(&calls[1], 1);
  CHECK(here.leave(&calls[0]));
  CHECK(here.place.now().context.op == 1);
  CHECK(here.leave(&calls[1]));
  CHECK(here.place.now().context == Context{});
}

TEST_CASE("nodes are counted while they run, with frames or without", "[record]") {
  PlaceRecording here;
  here.place.enter(&calls[0]).runs_node = true;
  here.place.change().node_sequence = 7;
  CHECK(here.place.in_node());
  CHECK(here.place.running_nodes() == 1);
  here.place.leave();
  CHECK_FALSE(here.place.in_node());

  here.place.adopt_node(4, 9, 1);
  here.place.begin_adopted_node();
  CHECK(here.place.running_nodes() == 1);
  CHECK(here.place.now().context.node == 4);
  here.place.end_adopted_node();
  CHECK(here.place.running_nodes() == 0);
  CHECK(here.place.now().context == Context{});
}

TEST_CASE("frames are as many as there is space for", "[record]") {
  PlaceRecording here;
  for (uint32_t i = 0; i < Place::kMaxDepth; ++i) {
    REQUIRE_FALSE(here.place.is_full());
    here.place.enter(&calls[0]);
  }
  CHECK(here.place.is_full());
}

TEST_CASE("the path of open scopes is that of those that have a part in it", "[record]") {
  ScopePath path;
  path.enter();
  path.append("encoder", true);
  path.enter();  // one of PyTorch's own
  path.enter();
  path.append("layer3", false);
  CHECK(path.text() == "encoder.layer3");
  path.leave();
  path.leave();
  CHECK(path.text() == "encoder");
  path.leave();
  path.leave();  // one that began before recording did
  CHECK(path.text().empty());
}
