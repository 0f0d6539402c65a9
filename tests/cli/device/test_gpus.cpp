#include "cli/device/gpus.h"
#include "profiler/error.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;

namespace {

constexpr const char* kGpu = R"({
  "id": "h100-sxm", "aliases": ["h100"], "name": "NVIDIA H100 80GB HBM3",
  "total_bytes": {"value": 85029158912, "mark": "S", "source": "somebody's log"},
  "compute_capability": {"value": "9.0", "mark": "P", "source": "specification"},
  "multiprocessors": {"value": 132, "mark": "S", "source": "somebody's log"},
  "context_bytes": {"value": 500, "mark": "U", "source": "a rule"},
  "first_kernel_bytes": {"value": 50, "mark": "U", "source": "a median"}
})";

/// As long as it lives the torch in use has code for these.
struct ArchitecturesOfTorch {
  explicit ArchitecturesOfTorch(const char* list) { setenv("OOMDIAG_ARCHITECTURES", list, 1); }
  ~ArchitecturesOfTorch() { unsetenv("OOMDIAG_ARCHITECTURES"); }
};

}  // namespace

TEST_CASE("a GPU is found by its id, its aliases and CUDA's name for it", "[cli]") {
  const TestFolder folder;
  folder.write("h100-sxm.json", kGpu);
  folder.write("README", "not a GPU");
  const auto gpus = read_catalogue(folder.path());

  REQUIRE(gpus.size() == 1);
  CHECK(gpus[0].total_bytes == 85029158912);
  CHECK(gpus[0].mark == "S");
  CHECK(gpus[0].context_bytes == 550);
  CHECK(gpus[0].gpu.threads_per_multiprocessor == 2048);  // what its compute capability has
  for (const char* name : {"h100-sxm", "H100_SXM", "h100", "nvidia h100 80gb hbm3"})
    CHECK(find_gpu(gpus, name) == gpus[0]);
}

TEST_CASE("a GPU with an older driver has the memory that such a driver leaves", "[cli]") {
  const TestFolder folder;
  const std::string gpu = kGpu;
  folder.write("h100-sxm.json", R"({"older_total_bytes": {"value": 85100000000, "mark": "C"},)" + gpu.substr(1));
  CHECK(choose_gpu(folder.path(), "h100@580").total_bytes == 85029158912);
  const GpuEntry older = choose_gpu(folder.path(), "h100@550");
  CHECK(older.total_bytes == 85100000000);
  CHECK(older.mark == "C");
  CHECK(older.id == "h100-sxm@550");
  CHECK(older.driver.branch == 550);
  CHECK(older.knows_driver());

  folder.write("h100-sxm.json", kGpu);
  CHECK_FALSE(choose_gpu(folder.path(), "h100@550").knows_driver());
  CHECK(choose_gpu(folder.path(), "h100@555").knows_driver());
  for (const char* wrong : {"h100@", "h100@470", "h100@new", "h100@5500", "@"})
    CHECK_THROWS_AS(choose_gpu(folder.path(), wrong), Error);
}

TEST_CASE("under Windows a GPU has all of its memory, and what does not fit goes into host memory", "[cli]") {
  const TestFolder folder;
  const std::string gpu = kGpu;
  folder.write("h100-sxm.json", R"({"wddm_total_bytes": {"value": 85520809984, "mark": "S"},)" + gpu.substr(1));
  const GpuEntry windows = choose_gpu(folder.path(), "h100@wddm");
  CHECK(windows.total_bytes == 85520809984);
  CHECK(windows.id == "h100-sxm@wddm");
  CHECK(windows.driver == Driver{.is_wddm = true, .host_bytes = int64_t{16} << 30});
  CHECK(windows.knows_driver());
  CHECK(choose_gpu(folder.path(), "h100@wddm+0").driver.host_bytes == 0);
  CHECK(choose_gpu(folder.path(), "h100@wddm+512MiB").id == "h100-sxm@wddm+512MiB");
  for (const char* wrong : {"h100@wddm+", "h100@wddm+x", "h100@wddm16GiB", "h100@wddm+-1", "h100@wddm+99999999GiB"})
    CHECK_THROWS_AS(choose_gpu(folder.path(), wrong), Error);

  folder.write("h100-sxm.json", kGpu);
  CHECK_FALSE(choose_gpu(folder.path(), "h100@wddm").knows_driver());
}

TEST_CASE("a driver is written as it is read", "[cli]") {
  for (const char* text : {"", "550", "wddm", "wddm+0", "wddm+1000", "wddm+3KiB", "wddm+512MiB", "wddm+8GiB"})
    CHECK(to_text(parse_driver(text)) == text);
  CHECK(bytes_of_windows(int64_t{24} << 30) == int64_t{570} << 20);
  CHECK(bytes_of_windows(int64_t{2} << 30) == int64_t{256} << 20);
}

TEST_CASE("a driver has the version of CUDA that its branch has", "[cli]") {
  CHECK(cuda_version_of(470) == 0);
  CHECK(cuda_version_of(525) == 12000);
  CHECK(cuda_version_of(550) == 12040);
  CHECK(cuda_version_of(580) == 13000);
  CHECK(cuda_version_of(640) == 0);  // newer than what is known here
}

TEST_CASE("an unknown GPU is answered with the nearest", "[cli]") {
  const TestFolder folder;
  folder.write("h100-sxm.json", kGpu);
  try {
    find_gpu(read_catalogue(folder.path()), "h100-pcie");
    FAIL("found");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::usage);
    CHECK(error.hint().find("h100-sxm") != std::string::npos);
  }
}

TEST_CASE("a file that is no GPU is one clear error", "[cli]") {
  const TestFolder folder;
  for (const char* text :
       {"", "{", "[]", "{\"name\": 1}", "{\"name\": \"x\", \"total_bytes\": 5}", "{\"nam\": \"x\"}"}) {
    CHECK_THROWS_AS(read_gpu_entry(folder.write("bad.json", text)), Error);
  }
  CHECK_THROWS_AS(read_gpu_entry(folder.path() / "absent.json"), Error);
}

TEST_CASE("a device file may keep what scripts/calibrate measured beside it", "[cli]") {
  const TestFolder folder;
  std::string measured = kGpu;
  measured.insert(measured.find('{') + 1, R"("measurements": {"malloc_free_us": {"with_callbacks": 9.5}},)");
  CHECK(read_gpu_entry(folder.write("measured.json", measured)).total_bytes == 85029158912);
}

TEST_CASE("a GPU without code in this torch is rejected with the reason", "[cli]") {
  const ArchitecturesOfTorch architectures("75,80,90");
  const TestFolder folder;
  std::string old = kGpu;
  old.replace(old.find("9.0"), 3, "7.0");
  const auto file = folder.write("old.json", old);

  CHECK(read_catalogue(folder.path()).empty());
  REQUIRE(read_unsupported(folder.path()).size() == 1);
  for (const std::string& name : {file.string(), std::string("h100")}) {
    try {
      choose_gpu(folder.path(), name);
      FAIL("chosen");
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::usage);
      CHECK(std::string(error.what()).find("its compute capability is 7.0") != std::string::npos);
    }
  }
}

TEST_CASE("a kernel is of the newest architecture that the GPU runs", "[cli]") {
  Gpu gpu;
  gpu.compute_major = 8;
  gpu.compute_minor = 9;
  CHECK(pick_architecture(gpu, "75,80,86,90") == 86);
  CHECK(runs_code_for(gpu, "80"));
  CHECK_FALSE(runs_code_for(gpu, "75,90"));
}
