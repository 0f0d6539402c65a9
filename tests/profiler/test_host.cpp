#include "profiler/host.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;

namespace {

constexpr const char* kMachine = "MemTotal: 64000000 kB\nMemFree: 1 kB\nMemAvailable:   8000000 kB\n";
constexpr int64_t kAvailable = int64_t{8'000'000} * 1024;

/// A container of version 2 whose own group is all that is mounted.
void write_version_2(const TestFolder& root, const std::string& max, const std::string& current) {
  root.write("proc/meminfo", kMachine);
  root.write("proc/self/cgroup", "0::/docker/4711\n");
  root.write("proc/self/mountinfo", "31 23 0:28 /docker/4711 /sys/fs/cgroup ro,nosuid shared:9 - cgroup2 cgroup rw\n");
  root.write("sys/fs/cgroup/memory.max", max);
  root.write("sys/fs/cgroup/memory.current", current);
}

}  // namespace

TEST_CASE("without a limit the memory that is available is the machine's", "[cli]") {
  const TestFolder root;
  CHECK_FALSE(available_memory(root.path()));
  CHECK_FALSE(total_memory(root.path()));
  root.write("proc/meminfo", kMachine);
  CHECK(available_memory(root.path()) == kAvailable);
  CHECK(total_memory(root.path()) == int64_t{64'000'000} * 1024);
  write_version_2(root, "max\n", "3000000000\n");
  CHECK(available_memory(root.path()) == kAvailable);
}

TEST_CASE("a cgroup's limit bounds the memory that is available, its file cache counts as free", "[cli]") {
  const TestFolder root;
  write_version_2(root, "4000000000\n", "3500000000\n");
  CHECK(available_memory(root.path()) == 500'000'000);
  root.write("sys/fs/cgroup/memory.stat", "anon 5\ninactive_file 1000000000\nactive_file 7\n");
  CHECK(available_memory(root.path()) == 1'500'000'000);
}

TEST_CASE("the tightest of a cgroup and those above it counts, in version 1 too", "[cli]") {
  const TestFolder root;
  root.write("proc/meminfo", kMachine);
  root.write("proc/self/cgroup", "5:cpu,cpuacct:/jobs/7\n4:memory:/jobs/7\n0::/\n");
  root.write("proc/self/mountinfo",
             "1 0 0:1 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
             "2 0 0:2 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n");
  const std::string memory = "sys/fs/cgroup/memory/jobs/", unlimited = "9223372036854771712\n";
  root.write(memory + "7/memory.limit_in_bytes", unlimited);
  root.write(memory + "7/memory.usage_in_bytes", "1000\n");
  root.write(memory + "memory.limit_in_bytes", "2000000000\n");
  root.write(memory + "memory.usage_in_bytes", "500000000\n");
  CHECK(available_memory(root.path()) == 1'500'000'000);
  root.write(memory + "7/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n");
  CHECK(count_oom_kills(root.path()) == 3);
  CHECK(total_memory(root.path()) == 2'000'000'000);
}

TEST_CASE("cores are bounded by the cgroup's quota of time", "[cli]") {
  const TestFolder root;
  const int of_affinity = available_cores(root.path());
  CHECK(of_affinity >= 1);
  write_version_2(root, "max\n", "1\n");
  root.write("sys/fs/cgroup/cpu.max", "max 100000\n");
  CHECK(available_cores(root.path()) == of_affinity);
  root.write("sys/fs/cgroup/cpu.max", "150000 100000\n");
  CHECK(available_cores(root.path()) == 1);
  root.write("proc/self/cgroup", "5:cpu:/\n");
  root.write("proc/self/mountinfo", "2 0 0:2 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n");
  root.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n");
  root.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  CHECK(available_cores(root.path()) == 1);
}

TEST_CASE("the kernel's OOM kills are counted where it reports them", "[cli]") {
  const TestFolder root;
  write_version_2(root, "max\n", "1\n");
  CHECK_FALSE(count_oom_kills(root.path()));
  root.write("sys/fs/cgroup/memory.events", "low 0\nhigh 0\nmax 5\noom 1\noom_kill 2\n");
  CHECK(count_oom_kills(root.path()) == 2);
}
