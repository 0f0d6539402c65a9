#include "cli/python/preload.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;

TEST_CASE("sanitizers come first, then the shim, the virtual device, and what the user preloads", "[cli]") {
  const TestFolder build;
  build.write("lib/liboomdiag_preload.so");
  for (const char* name : {"libnvidia-ml.so.1", "libcudart.so.13", "libcuda.so.1", "unrelated.so"}) {
    build.write(std::string("lib/virtual_device/") + name);
  }
  const std::string lib = (build.path() / "lib").string();
  PreloadParts parts{.first = "libasan.so.8",
                     .libraries = lib,
                     .virtual_device = lib + "/virtual_device",
                     .cuda_major = 0,
                     .users_own = "a.so b.so"};

  CHECK(compose_preload(parts) == "libasan.so.8:" + lib + "/liboomdiag_preload.so:" + lib +
                                      "/virtual_device/libcuda.so.1:" + lib + "/virtual_device/libcudart.so.13:" + lib +
                                      "/virtual_device/libnvidia-ml.so.1:a.so b.so");

  parts = {.first = "", .libraries = lib, .virtual_device = "", .cuda_major = 0, .users_own = ""};
  CHECK(compose_preload(parts) == lib + "/liboomdiag_preload.so");
}

TEST_CASE("of the virtual device only what the CUDA of the program's torch asks for is preloaded, where that is known",
          "[cli]") {
  const TestFolder build;
  for (const char* name : {"libcuda.so.1", "libcudart.so.13", "libnccl.so.2", "libcudart.so.12", "libcufft.so.11"}) {
    build.write(name);
  }
  const std::string lib = build.path().string() + "/";
  const auto preloaded = [&](int major) {
    return compose_preload(
        {.first = "", .libraries = "/nowhere", .virtual_device = build.path(), .cuda_major = major, .users_own = ""});
  };
  CHECK(preloaded(13) == lib + "libcuda.so.1:" + lib + "libcudart.so.13:" + lib + "libnccl.so.2");
  CHECK(preloaded(12) ==
        lib + "libcuda.so.1:" + lib + "libnccl.so.2:" + lib + "libcudart.so.12:" + lib + "libcufft.so.11");
  CHECK(preloaded(0).find("libcudart.so.12:") != std::string::npos);
  CHECK(preloaded(0).find("libcudart.so.13:") != std::string::npos);
}

TEST_CASE("what is not there is not preloaded", "[cli]") {
  CHECK(compose_preload(
            {.first = "", .libraries = "/nowhere", .virtual_device = "/nowhere", .cuda_major = 0, .users_own = ""})
            .empty());
}

TEST_CASE("a folder that the loader would split is reached through a link, which goes afterwards", "[cli]") {
  const TestFolder parent;
  for (const char* name : {"My Projects", "a:b", "cost$"}) {
    const std::filesystem::path library = parent.write(std::string(name) + "/x.so").parent_path();
    CHECK_FALSE(can_be_preloaded(library));
    std::filesystem::path link;
    {
      const PreloadFolder folder(library);
      link = folder.path();
      CHECK(can_be_preloaded(link));
      CHECK(std::filesystem::exists(link / "x.so"));
    }
    CHECK_FALSE(std::filesystem::exists(link.parent_path()));
    CHECK(std::filesystem::exists(library / "x.so"));
  }
}

TEST_CASE("a folder that the loader takes is used as it is", "[cli]") {
  const TestFolder folder;
  CHECK(PreloadFolder(folder.path()).path() == folder.path());
}
