#include "cli/python/first_use.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;

TEST_CASE("units are compiled in the order in which they are listed", "[cli]") {
  CHECK(read_units("hooks a.cpp\nhooks b.cpp\ncore c.cpp\n") ==
        std::vector<CompiledUnit>{{"hooks", {"a.cpp", "b.cpp"}}, {"core", {"c.cpp"}}});
  CHECK(read_units("").empty());
}

TEST_CASE("what is built for one torch is not taken for another, nor for another interpreter or other sources",
          "[cli]") {
  const TorchOfPython torch{.tag = "cpython-311", .version = "2.9.1+cu128"};
  TorchOfPython later = torch;
  later.tag = "cpython-312";

  CHECK(name_of_build(torch, false, 0x1234) == "2.9.1+cu128-cpython-311-0000000000001234");
  CHECK(name_of_build(torch, true, 0x1234) != name_of_build(torch, false, 0x1234));
  CHECK(name_of_build(later, false, 0x1234) != name_of_build(torch, false, 0x1234));
  CHECK(name_of_build(torch, false, 1) != name_of_build(torch, false, 2));
}

TEST_CASE("a torch that the recorder is not written for is recognized by its version", "[cli]") {
  CHECK(has_interface("2.6.0+cu124"));
  CHECK(has_interface("2.15.0"));
  CHECK(has_interface("3.0"));
  CHECK_FALSE(has_interface("2.5.1+cu121"));
  CHECK_FALSE(has_interface("1.13.1"));
  CHECK(has_interface("of-our-own"));
}

TEST_CASE("headers are those of the packages beside torch, then those of Triton", "[cli]") {
  const TestFolder packages;
  packages.write("nvidia/cuda_runtime/include/cuda.h");
  packages.write("nvidia/cublas/include/cublas.h");
  packages.write("nvidia/nvtx/lib/x.so");
  packages.write("triton/backends/nvidia/include/crt/host_defines.h");

  const auto found = header_folders(packages.path() / "torch");
  const auto nvidia = packages.path() / "nvidia";
  REQUIRE(found.size() >= 3);
  CHECK(found[0] == nvidia / "cublas" / "include");
  CHECK(found[1] == nvidia / "cuda_runtime" / "include");
  CHECK(found[2] == packages.path() / "triton" / "backends" / "nvidia" / "include");
}
