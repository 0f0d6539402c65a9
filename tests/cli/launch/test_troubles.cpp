#include <algorithm>

#include "cli/launch/checkup.h"
#include "tests/catch.h"

using namespace oomdiag;

namespace {

bool mentions(const Checkup& checkup, std::string_view word) {
  const auto troubles = find_troubles(checkup);
  return std::any_of(troubles.begin(), troubles.end(),
                     [&](const Trouble& one) { return !one.fix.empty() && one.what.find(word) != std::string::npos; });
}

}  // namespace

TEST_CASE("where all is well nothing limits a diagnosis", "[doctor]") {
  CHECK(find_troubles({.has_gpu = true, .hooks = {{"allocator", true, ""}}, .asked_nvml = true}).empty());
}

TEST_CASE("without a GPU the message says what runs instead", "[doctor]") {
  CHECK(mentions({.has_gpu = false}, "no GPU here"));
}

TEST_CASE("who holds CUPTI is named", "[doctor]") {
  CHECK(mentions({.has_gpu = true, .missing = {"module paths: not found in torch 2.16.0"}}, "module paths: not found"));
  CHECK(mentions({.has_gpu = true, .hooks = {{"driver (CUPTI)", false, ""}}, .cupti_holder = "held by Nsight Systems"},
                 "held by Nsight Systems"));
}

TEST_CASE("another allocator, none, and two minds about it are troubles", "[doctor]") {
  CHECK(mentions({.has_gpu = true, .settings = {{"allocator backend", "cudaMallocAsync"}}}, "cudaMallocAsync"));
  CHECK(mentions({.has_gpu = true, .settings = {{"PYTORCH_NO_CUDA_MEMORY_CACHING", "1"}}}, "no caching allocator"));
  CHECK(mentions({.has_gpu = true, .settings = {{"PYTORCH_ALLOC_CONF", "a:1"}, {"PYTORCH_CUDA_ALLOC_CONF", "a:2"}}},
                 "different things"));
  CHECK_FALSE(
      mentions({.has_gpu = true, .settings = {{"PYTORCH_ALLOC_CONF", "a:1"}, {"PYTORCH_CUDA_ALLOC_CONF", "a:1"}}},
               "different things"));
}

TEST_CASE("other processes on the GPU are added up", "[doctor]") {
  CHECK(mentions({.has_gpu = true, .processes = {{1, "a", int64_t{1} << 30}, {2, "b", int64_t{1} << 29}}}, "1.50 GiB"));
}

TEST_CASE("a failure comes first, with its fix", "[doctor]") {
  const auto troubles = find_troubles({.failure = "no torch", .fix = "install it"});
  CHECK(troubles.front() == Trouble{"no torch", "install it"});
}
