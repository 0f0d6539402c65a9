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
  PreloadParts parts{
      .first = "libasan.so.8", .libraries = lib, .virtual_device = lib + "/virtual_device", .users_own = "a.so b.so"};

  CHECK(compose_preload(parts) == "libasan.so.8:" + lib + "/liboomdiag_preload.so:" + lib +
                                      "/virtual_device/libcuda.so.1:" + lib + "/virtual_device/libcudart.so.13:" + lib +
                                      "/virtual_device/libnvidia-ml.so.1:a.so b.so");

  parts = {.first = "", .libraries = lib, .virtual_device = "", .users_own = ""};
  CHECK(compose_preload(parts) == lib + "/liboomdiag_preload.so");
}

TEST_CASE("what is not there is not preloaded", "[cli]") {
  CHECK(compose_preload({.first = "", .libraries = "/nowhere", .virtual_device = "/nowhere", .users_own = ""}).empty());
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
