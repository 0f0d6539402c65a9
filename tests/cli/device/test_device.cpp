#include "cli/device/device.h"
#include "profiler/error.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;

namespace {

/// A catalogue of two GPUs.
struct Catalogue {
  Catalogue() {
    for (const char* id : {"t4", "h200"}) {
      const std::string name = std::string("NVIDIA ") + id;
      folder.write(std::string("gpus/") + id + ".json",
                   R"({"id": ")" + std::string(id) + R"(", "name": ")" + name + R"(",
                       "total_bytes": {"value": 16000000000}, "compute_capability": {"value": "9.0"},
                       "multiprocessors": {"value": 40}, "context_bytes": {"value": 0}})");
    }
    install.gpus = folder.path() / "gpus";
  }
  DeviceChoice choose(const DeviceOptions& options) const { return choose_device(options, install); }
  VirtualHost host(const DeviceOptions& options) const { return std::get<VirtualHost>(choose(options).device); }

  TestFolder folder;
  Install install;
};

}  // namespace

TEST_CASE("several devices are a list, or a number of one", "[cli]") {
  const Catalogue catalogue;
  CHECK(catalogue.host({.device = "h200,t4,t4"}).gpus.size() == 3);
  CHECK(describe(catalogue.choose({.device = "h200,t4"})) == "NVIDIA h200, NVIDIA t4 (virtual)");
  CHECK(describe(catalogue.choose({.device = "t4", .count = 4})) == "4 x NVIDIA t4 (virtual)");
  CHECK(describe(catalogue.choose({.count = 2})) == "2 x NVIDIA h200 (virtual)");
  const VirtualHost host = catalogue.host({.device = "t4", .memory = "8GiB", .count = 2});
  CHECK(host.memory_bytes == int64_t{8} << 30);
  CHECK(host.bytes_of_device() == int64_t{8} << 30);
  CHECK(catalogue.host({.device = "t4"}).bytes_of_device() == 16'000'000'000);
  CHECK(describe(catalogue.choose({.device = "real"})) == "the real GPU");
}

TEST_CASE("a machine has one driver, which runs the CUDA that torch is for", "[cli]") {
  Catalogue catalogue;
  CHECK_THROWS_AS(catalogue.choose({.device = "h200@580,t4"}), Error);
  CHECK(catalogue.host({.device = "h200@580,t4@580"}).gpus.size() == 2);
  const DeviceChoice older = catalogue.choose({.device = "t4@550", .count = 2});
  CHECK(older.virtual_host()->gpus[1].driver.branch == 550);
  CHECK_NOTHROW(check_driver(older, "2.8.0+cu128"));
  CHECK_THROWS_AS(check_driver(older, "2.15.0+cu132"), Error);
  CHECK_NOTHROW(check_driver(catalogue.choose({.device = "t4@580"}), "2.15.0+cu132"));
  CHECK_NOTHROW(check_driver(catalogue.choose({.device = "real"}), "2.15.0+cu132"));
}

TEST_CASE("options that contradict each other are rejected with the fix", "[cli]") {
  const Catalogue catalogue;
  CHECK_THROWS_AS(catalogue.choose({.device = "h200,t4", .count = 2}), Error);
  CHECK_THROWS_AS(catalogue.choose({.device = "real", .count = 2}), Error);
  CHECK_THROWS_AS(catalogue.choose({.device = "real", .clocked = true}), Error);
  CHECK_THROWS_AS(catalogue.choose({.device = ","}), Error);
  CHECK_THROWS_AS(catalogue.choose({.device = "t4,nothing"}), Error);
}
