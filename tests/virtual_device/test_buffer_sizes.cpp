#include "extension/virtual_device/nccl/buffer_sizes.h"
#include "tests/catch.h"

using namespace oomdiag;

namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr Topology kNvlink{.host = Topology::Host::nvlink, .network = Topology::Network::rdma};

}  // namespace

TEST_CASE("an all-to-all of eight H100 takes what was measured", "[virtual_device]") {
  const BufferSizes sizes = estimate_buffers({.ranks = 8, .ranks_here = 8, .architecture = 90}, kNvlink, {});
  CHECK(7 * sizes.peer_here == 3136 * kMiB);  // NVIDIA/nccl issue 1685: 3.28 GB, 3 288 334 336 bytes
}

TEST_CASE("groups of more than two A100 take a tree, as was measured", "[virtual_device]") {
  const NcclSettings older{.maps_memory = false};
  const Group two{.ranks = 2, .ranks_here = 2, .architecture = 80},
      four{.ranks = 4, .ranks_here = 4, .architecture = 80};
  CHECK(estimate_buffers(two, kNvlink, older) == BufferSizes{.ring = 288 * kMiB, .peer_here = 384 * kMiB});
  CHECK(estimate_buffers(four, kNvlink, older).tree == 144 * kMiB);  // issue 964: 688 of 544 MB
}

TEST_CASE("a communicator of one takes nothing", "[virtual_device]") {
  CHECK(estimate_buffers({}, kNvlink, {}) == BufferSizes{});
}

TEST_CASE("GPUs that do not reach each other exchange through the host's memory", "[virtual_device]") {
  const Topology games{.host = Topology::Host::shared_memory, .network = Topology::Network::tcp};
  CHECK(estimate_buffers({.ranks = 16, .ranks_here = 2, .architecture = 89}, games, {}) == BufferSizes{});
  const Topology linked_by_pcie{.host = Topology::Host::pcie, .network = Topology::Network::rdma};
  CHECK(estimate_buffers({.ranks = 2, .ranks_here = 2, .architecture = 89}, linked_by_pcie, {}) ==
        BufferSizes{.ring = 28 * kMiB, .peer_here = 28 * kMiB});
}

TEST_CASE("between hosts buffers lie at both ends, and messages share theirs", "[virtual_device]") {
  const BufferSizes sizes = estimate_buffers({.ranks = 64, .ranks_here = 8, .architecture = 90}, kNvlink, {});
  CHECK(sizes.ring == 16 * (7 * 14 + 20) * kMiB / 8);
  CHECK(sizes.multicast == 256 * kMiB);
  CHECK(sizes.elsewhere == 128 * kMiB);
  const Topology slow{.host = Topology::Host::nvlink, .network = Topology::Network::tcp};
  CHECK(estimate_buffers({.ranks = 8, .ranks_here = 1, .architecture = 90}, slow, {}) == BufferSizes{});
}

TEST_CASE("the user's settings of NCCL count", "[virtual_device]") {
  const Group group{.ranks = 2, .ranks_here = 2, .architecture = 90};
  CHECK(estimate_buffers(group, kNvlink, {.most_channels = 4}).ring == 4 * 14 * kMiB);
  CHECK(estimate_buffers(group, kNvlink, {.simple_bytes = 8 << 20}).ring == 24 * 18 * kMiB);
  CHECK(estimate_buffers({.ranks = 8, .ranks_here = 8, .architecture = 90}, kNvlink, {.nvls = false}).multicast == 0);
}

TEST_CASE("what the user says of the links changes what GPUs report", "[virtual_device]") {
  Topology topology = kNvlink;
  CHECK(read_topology("pcie", topology));
  CHECK((topology.host == Topology::Host::pcie && topology.network == Topology::Network::rdma));
  CHECK(read_topology(",tcp", topology));
  CHECK((topology.host == Topology::Host::pcie && topology.network == Topology::Network::tcp));
  CHECK_FALSE(read_topology("token ring", topology));
  CHECK(describe_rule({.ranks = 16, .ranks_here = 8, .architecture = 90}, kNvlink, {}) ==
        "16 channels over NVLink and over RDMA");
}
