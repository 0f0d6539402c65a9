#include "extension/record/pending_oom.h"
#include "tests/catch.h"

using namespace oomdiag;

TEST_CASE("an OOM becomes the failure of the op that it came up in", "[record]") {
  PendingOom oom;
  oom.note_request({.sequence = 5, .address = 1, .context = 3, .call_id = 7, .kind = EventKind::out_of_memory});
  oom.open({.context = 99}, 2);
  REQUIRE(oom.is_open());
  oom.place(4, 50);  // of another request
  oom.place(5, 4);
  const Event failed = oom.close(11);
  CHECK(failed.kind == EventKind::op_failed);
  CHECK(failed.context == 4);
  CHECK(failed.call_id == 7);
  CHECK(failed.device == 2);
  CHECK(failed.time == 11);
  CHECK(failed.address == 0);
  CHECK_FALSE(oom.is_open());
}

TEST_CASE("an OOM that the allocator did not write is where the thread is", "[record]") {
  PendingOom oom;
  oom.note_request({.context = 3, .kind = EventKind::out_of_memory});
  oom.open({}, 0);
  oom.close(1);
  oom.open({.context = 8}, 1);
  CHECK(oom.close(2).context == 8);
}

TEST_CASE("an OOM is described once in a call of an op", "[record]") {
  PendingOom oom;
  CHECK_FALSE(oom.is_described(7));
  CHECK(oom.is_described(7));
  CHECK_FALSE(oom.is_described(8));
  CHECK_FALSE(oom.is_described(0));
  CHECK_FALSE(oom.is_described(0));  // outside of any op
}
