#include "profiler/explain/explain.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/non_pytorch/non_pytorch.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

using namespace oomdiag;

namespace {

/// A trace of what the driver and NVML report, on a real GPU unless said otherwise.
struct RecordedDriver {
  Trace trace;
  std::vector<uint64_t> events;

  RecordedDriver() { trace.names = {""}; }

  RecordedDriver& add(Event event, std::string_view name) {
    event.detail = trace.names.size();
    trace.names.emplace_back(name);
    event.sequence = trace.events.size() + 1;
    events.push_back(trace.events.size());
    trace.events.push_back(event);
    return *this;
  }
  RecordedDriver& take(uint64_t address, int64_t bytes, std::string_view owner,
                       DriverMemory memory = DriverMemory::device, unsigned flags = 0, uint32_t context = 0) {
    return add({.address = address,
                .bytes = bytes,
                .context = context,
                .kind = EventKind::driver_alloc,
                .flags = static_cast<uint16_t>(static_cast<unsigned>(memory) | flags)},
               owner);
  }
  RecordedDriver& give(uint64_t address) { return add({.address = address, .kind = EventKind::driver_free}, ""); }
  RecordedDriver& step(std::string_view name, int64_t bytes) {
    return add({.bytes = bytes, .kind = EventKind::gpu_step}, name);
  }
  RecordedDriver& process(uint64_t pid, int64_t bytes, std::string_view name, unsigned flags = 0) {
    return add({.address = pid, .bytes = bytes, .kind = EventKind::gpu_process, .flags = static_cast<uint16_t>(flags)},
               name);
  }
  RecordedDriver& segment(uint64_t address, int64_t bytes) {
    return add({.address = address, .bytes = bytes, .kind = EventKind::segment_alloc}, "");
  }
  NonPytorchState state() const { return read_non_pytorch(trace, events, trace.events.size()); }
  std::vector<NonPytorchOwner> owners(std::vector<SegmentLayout> segments = {}) const {
    return list_owners(state(), segments);
  }
};

}  // namespace

TEST_CASE("pinned host memory is named by the place that requested it, largest first", "[outside]") {
  RecordedDriver driver;
  driver.trace.names = {"", "aten::_pin_memory", "train.py:31", "loader.py:7"};
  driver.trace.contexts = {{}, {.op = 1, .source = 2}, {.op = 1, .source = 3}};
  const auto pin = [&](uint64_t address, int64_t bytes, uint32_t context) {
    driver.take(address, bytes, "libtorch_cuda.so", DriverMemory::pinned, 0, context);
  };
  pin(0x1000, 100, 1);
  pin(0x2000, 70, 2);
  pin(0x3000, 60, 2);
  pin(0x4000, 500, 1);
  driver.give(0x4000).take(0x5000, 5, "libnccl.so.2", DriverMemory::pinned).take(0x6000, 9, "libnccl.so.2");

  CHECK(
      list_pinned_host_memory(driver.trace, driver.state()) ==
      std::vector<PinnedHostMemory>{
          {.owner = "libtorch_cuda.so", .op = "aten::_pin_memory", .source = "loader.py:7", .bytes = 130, .blocks = 2},
          {.owner = "libtorch_cuda.so", .op = "aten::_pin_memory", .source = "train.py:31", .bytes = 100, .blocks = 1},
          {.owner = "libnccl.so.2", .bytes = 5, .blocks = 1}});
}

TEST_CASE("libraries are added up by name and kind, largest first", "[outside]") {
  RecordedDriver driver;
  driver.take(0x1000, 10, "libcublas.so.13").take(0x2000, 5, "libcublas.so.13").take(0x3000, 70, "libnccl.so.2");
  driver.take(0x4000, 9, "libnccl.so.2", DriverMemory::handle).take(0x5000, 99, "libnccl.so.2").give(0x5000);

  CHECK(driver.owners() == std::vector<NonPytorchOwner>{{"libnccl.so.2", "device", 70},
                                                        {"libcublas.so.13", "device", 15},
                                                        {"libnccl.so.2", "handle", 9}});
}

TEST_CASE("PyTorch's own segments are not counted twice", "[outside]") {
  RecordedDriver driver;
  driver.take(0x1000, 20, "libc10_cuda.so").take(0x9000, 30, "libmypool.so").segment(0x9000, 30);
  driver.take(0xa000, 40, "libmypool.so");
  CHECK(driver.owners() == std::vector<NonPytorchOwner>{{"libmypool.so", "device", 40}});

  SECTION("and what comes to lie where a segment was is not PyTorch's") {
    driver.give(0x9000).take(0x9000, 5, "libother.so");
    CHECK(sum_of(driver.owners()) == 45);
  }
}

TEST_CASE("pages that lie under a segment are PyTorch's, whoever made them", "[outside]") {
  RecordedDriver driver;
  driver.take(uint64_t{1} << 63 | 7, 30, "libnccl.so.2", DriverMemory::handle);
  driver.add({.address = 0x9000, .bytes = 30, .kind = EventKind::driver_map}, "");
  driver.trace.events.in_memory().back().detail = uint64_t{1} << 63 | 7;
  CHECK(driver.owners().size() == 1);
  CHECK(driver.segment(0x9000 + 10, 20).owners().empty());
}

TEST_CASE("a virtual GPU charges whole pages above half a page, a real one what was asked for", "[outside]") {
  RecordedDriver driver;
  driver.take(0x1000, 1, "libcublas.so.13").take(0x2000, 3_MiB, "libcublas.so.13");
  CHECK(sum_of(driver.owners()) == 3_MiB + 1);
  driver.trace.process.virtual_device = true;
  CHECK(sum_of(driver.owners()) == 4_MiB + 1);
}

TEST_CASE("Windows is the system, a process of that name is one", "[outside]") {
  RecordedDriver driver;
  driver.process(0, 0, "", kFirstProcess).process((1 << 22) + 4, 570, "Windows").process(4711, 20, "Windows");
  CHECK(driver.owners() ==
        std::vector<NonPytorchOwner>{{"Windows", "system", 570}, {"process 4711 Windows", "process", 20}});
}

TEST_CASE("pinned and managed memory is the host's", "[outside]") {
  RecordedDriver driver;
  driver.take(0x1000, 10, "libtorch_cuda.so", DriverMemory::pinned).take(0x2000, 5, "mine.so", DriverMemory::managed);
  CHECK(driver.owners().empty());
  CHECK(list_host_owners(driver.state()) ==
        std::vector<NonPytorchOwner>{{"libtorch_cuda.so", "pinned", 10}, {"mine.so", "managed", 5}});
}

TEST_CASE("a failed request to the driver holds nothing", "[outside]") {
  RecordedDriver driver;
  driver.take(0, 10_GiB, "libnccl.so.2", DriverMemory::device, kDriverOutOfMemory);
  driver.take(0, 4_GiB, "libnccl.so.2", DriverMemory::device, kDriverOutOfMemory);
  driver.take(0, 5_GiB, "libc10_cuda.so", DriverMemory::device, kDriverOutOfMemory);
  CHECK(driver.owners().empty());
  CHECK(driver.state().failed_requests == std::vector<NonPytorchOwner>{{"libnccl.so.2", "device", 10_GiB}});
}

TEST_CASE("the context and all modules have a line each, cuInit has none", "[outside]") {
  RecordedDriver driver;
  driver.step("cuInit", 3)
      .step("context", 500)
      .step("modules of libtorch_cuda.so", 60)
      .step("modules of libcublas.so.13", 7);
  CHECK(driver.owners() == std::vector<NonPytorchOwner>{{"context", "device", 500}, {"modules", "device", 67}});
  CHECK(driver.state().steps.size() == 4);
}

TEST_CASE("of other processes the newest list counts", "[outside]") {
  RecordedDriver driver;
  driver.process(0, 0, "", kFirstProcess).process(41, 100, "python").process(42, 200, "Xorg");
  driver.process(0, 0, "", kFirstProcess).process(42, 250, "");
  CHECK(driver.owners() == std::vector<NonPytorchOwner>{{"process 42", "process", 250}});
}

TEST_CASE("only what came before the moment counts", "[outside]") {
  RecordedDriver driver;
  driver.take(0x1000, 10, "a.so").take(0x2000, 20, "b.so");
  CHECK(sum_of(list_owners(read_non_pytorch(driver.trace, driver.events, 1), {})) == 10);
}

TEST_CASE("what outlived the oldest event is announced, and counts from the start", "[outside]") {
  RecordedDriver driver;
  driver.take(0x2000, 20, "b.so").give(0x2000);
  driver.take(0x1000, 10, "a.so", DriverMemory::device, kDriverAnnounced);
  driver.take(0x3000, 40, "c.so").take(0x3000, 40, "c.so", DriverMemory::device, kDriverAnnounced);
  driver.trace.overwritten_events = 100;
  CHECK(list_owners(read_non_pytorch(driver.trace, driver.events, 1), {}) ==
        std::vector<NonPytorchOwner>{{"b.so", "device", 20}, {"a.so", "device", 10}});
  const std::vector<SegmentLayout> segments{{.address = 0x1000, .bytes = 10}};  // whose making was overwritten
  CHECK(list_owners(read_non_pytorch(driver.trace, driver.events, 1), segments).size() == 1);
}

TEST_CASE("absurd sizes do not overflow the sums", "[outside]") {
  RecordedDriver driver;
  for (uint64_t i = 1; i < 10000; ++i)
    driver.take(i, INT64_MAX, "a.so").process(i, INT64_MIN, "p").step("context", INT64_MAX);
  CHECK(sum_of(driver.owners()) <= kMaxSaneBytes);
}

TEST_CASE("the non-PyTorch cause names who holds what is missing", "[outside]") {
  const OutOfMemory failure{.requested_bytes = 1_GiB};
  MemoryState state{
      .allocated_bytes = 1_GiB, .reserved_bytes = 1_GiB, .non_pytorch_bytes = 6_GiB, .free_bytes = 500_MiB};
  state.non_pytorch = {{"context", "device", 400_MiB},
                       {"libnccl.so.2", "device", 600_MiB},
                       {"process 41 python", "process", 5_GiB},
                       {"unexplained", "", 6_GiB - 5_GiB - 1000_MiB}};
  const Cause cause = find_cause(failure, state, {}, gpu_of(7_GiB + 500_MiB));
  CHECK(cause.kind == CauseKind::non_pytorch);
  REQUIRE(cause.holders.size() == 3);
  CHECK(cause.holders[0].owner == "process 41 python");
  CHECK(cause.holders[1].owner == "libnccl.so.2");
}

TEST_CASE("some unexplained bytes beside a measured context accuse nobody", "[outside]") {
  const OutOfMemory failure{.requested_bytes = 1_GiB};
  MemoryState state{
      .allocated_bytes = 6_GiB, .reserved_bytes = 6_GiB, .non_pytorch_bytes = 900_MiB, .free_bytes = 500_MiB};
  state.non_pytorch = {{"context", "device", 300_MiB}, {"unexplained", "", 600_MiB}};
  CHECK(find_cause(failure, state, {}, gpu_of(6_GiB + 1400_MiB)).kind == CauseKind::capacity);
}
