#include "cli/python/python.h"
#include "profiler/error.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;

namespace {

Install built_for(const std::string& version) {
  Install install;
  install.python = "/private/python";
  install.torch_version = version;
  return install;
}

TorchOfPython torch_of(const std::string& version, const std::string& cuda) {
  return {.python = "python", .tag = "cpython-311", .folder = "/site-packages/torch", .version = version, .cuda = cuda};
}

}  // namespace

TEST_CASE("an interpreter is distinguished from other programs by its name", "[cli]") {
  CHECK(is_python("python"));
  CHECK(is_python("/usr/bin/python3.12"));
  CHECK_FALSE(is_python("python-config"));
  CHECK_FALSE(is_python("ipython"));
  CHECK_FALSE(is_python("./train.py"));
}

TEST_CASE("the minor version is what counts", "[cli]") {
  CHECK(minor_of("2.15.0+cu132") == "2.15");
  CHECK(minor_of("2.15") == "2.15");
  CHECK(minor_of("2") == "2");
  CHECK(minor_of("") == "");
}

TEST_CASE("torch's version, CUDA and ROCm are read from its version.py", "[cli]") {
  TorchOfPython torch;
  read_version_py(
      "from typing import Optional\n\n__all__ = ['__version__', 'cuda', 'hip']\n__version__ = '2.9.1+cu128'\n"
      "debug = False\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n",
      torch);
  CHECK(torch.version == "2.9.1+cu128");
  CHECK(torch.cuda == "12.8");
  CHECK_FALSE(torch.is_rocm);

  read_version_py("__version__ = \"2.11.0\"\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4'", torch);
  CHECK(torch.version == "2.11.0");
  CHECK(torch.cuda.empty());
  CHECK(torch.is_rocm);

  read_version_py("__version__ = ", torch);
  CHECK(torch.version.empty());
}

TEST_CASE("the caller's python runs if it has a torch, the private one if it has none", "[cli]") {
  const Install install = built_for("2.15.0+cu132");

  CHECK(choose_python("python", torch_of("2.15.1+cu132", "13.2"), install).executable == "python");
  CHECK_FALSE(choose_python("python", torch_of("2.15.1+cu132", "13.2"), install).needs_own_recorder);
  CHECK(choose_python("python", {}, install).executable == "/private/python");
}

TEST_CASE("another torch than that of the build needs a recorder of its own, any torch where there is no build",
          "[cli]") {
  CHECK(choose_python("python", torch_of("2.11.0+cu130", "13.0"), built_for("2.15.0+cu132")).needs_own_recorder);
  CHECK(choose_python("python", torch_of("2.9.1", "12.8"), Install{}).needs_own_recorder);
  CHECK(choose_python("python", {}, Install{}).no_recorder == "'python' has no torch");
}

TEST_CASE("another environment never takes the place of a python that is not there", "[cli]") {
  Install install = built_for("2.15.0+cu132");

  try {
    prepare_torch("/nowhere/bin/python3", install);
    FAIL("it was replaced");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::environment);
    CHECK(std::string(error.what()).find("/nowhere/bin/python3") != std::string::npos);
  }
}

TEST_CASE("another environment never takes the place of a named python that has no torch", "[cli]") {
  const TestFolder folder;
  const std::filesystem::path named = folder.write("venv/bin/python3", "#!/bin/sh\necho cpython-311\necho\n");
  std::filesystem::permissions(named, std::filesystem::perms::owner_all);
  Install install = built_for("2.15.0+cu132");

  try {
    prepare_torch(named.string(), install);
    FAIL("it was replaced");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::environment);
    CHECK(std::string(error.what()) == "'" + named.string() + "' has no torch");
    CHECK(error.hint() == "install it there: " + named.string() +
                              " -m pip install torch; or name /private/python, which has torch 2.15.0+cu132");
  }
  Install without_torch;  // of a wheel: there is no other environment, and it runs as it is
  CHECK(prepare_torch(named.string(), without_torch) == named.string());
}

TEST_CASE("a python whose torch cannot be recorded runs all the same, and it is said why", "[cli]") {
  const Install install = built_for("2.15.0+cu132");

  const PythonChoice without_cuda = choose_python("python", torch_of("2.15.0+cpu", ""), install);
  CHECK(without_cuda.executable == "python");
  CHECK(without_cuda.note.find("without CUDA") != std::string::npos);
  CHECK_FALSE(without_cuda.needs_own_recorder);
  TorchOfPython rocm = torch_of("2.15.0+rocm7", "");
  rocm.is_rocm = true;
  CHECK(choose_python("python", rocm, install).note.find("ROCm") != std::string::npos);
}

TEST_CASE("torchrun and its like are scripts of a python", "[cli]") {
  CHECK(read_interpreter("#!/venv/bin/python3.12\nimport sys\n") == "/venv/bin/python3.12");
  CHECK(read_interpreter("#!/usr/bin/env python3\n") == "python3");
  CHECK(read_interpreter("#!/bin/sh\n'''exec' \"/my venv/bin/python\" \"$0\" \"$@\"\n' '''\n") ==
        "/my venv/bin/python");
  CHECK(read_interpreter("#!/bin/bash\npython train.py\n").empty());
  CHECK(read_interpreter("ELF").empty());
}
