#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of allocator_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

TEST_CASE("where only a free block is missing, tensors that stay are the reason", "[explain][reasons]") {
  DeviceHistory device = at_oom({{.address = 1,
                                  .bytes = 100_MiB,
                                  .requested_bytes = 100_MiB,
                                  .made = {.op = "aten::zeros", .source = "a.py:3"}}});
  device.state.segments = {{.bytes = 200_MiB, .used_bytes = 100_MiB, .holes = 2, .blocked_by = {1}}};
  const auto reason = find_reason({.device = device, .growths = {}, .cause = CauseKind::fragmentation});
  REQUIRE(reason);
  CHECK(reason->id == "fragmentation");
  CHECK(reason->text ==
        "what is free lies in 2 pieces between tensors that stay, as those made at "
        "a.py:3");
  device.referrers = {{.variable = "dict 'pool' in embed (a.py:1)",
                       .made = device.state.blocks.front().made,
                       .storage_bytes = 100_MiB}};
  const auto kept = find_reason({.device = device,
                                 .growths = {{.bytes_per_step = 1_MiB, .grown_bytes = 9_MiB}},
                                 .cause = CauseKind::fragmentation});
  REQUIRE(kept);
  CHECK(kept->text ==
        "what is free lies in 2 pieces between tensors that dict 'pool' in embed (a.py:1) keeps, as those made at "
        "a.py:3");
  CHECK(kept->how.front() ==
        "pool[key] = x.detach().cpu()  # of a scalar: x.item(); where it is read again: .to(device)");
}

}  // namespace oomdiag
