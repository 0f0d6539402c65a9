#include "cli/python.h"
#include "profiler/error.h"
#include "tests/catch.h"

using namespace oomdiag;

namespace {

Install built_for(const std::string& version) {
  Install install;
  install.python = "/private/python";
  install.torch_version = version;
  return install;
}

}  // namespace

TEST_CASE("an interpreter is told from other programs by its name", "[cli]") {
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

TEST_CASE("torch's version is read from its version.py", "[cli]") {
  CHECK(read_torch_version("from typing import Optional\n\n__version__ = '2.15.0+cu132'\ndebug = False\n") ==
        "2.15.0+cu132");
  CHECK(read_torch_version("__version__ = \"2.11.0\"") == "2.11.0");
  CHECK(read_torch_version("__version__ = ") == std::nullopt);
  CHECK(read_torch_version("") == std::nullopt);
}

TEST_CASE("the caller's python runs if it has our torch, the private one if it has none", "[cli]") {
  const Install install = built_for("2.15.0+cu132");

  CHECK(choose_python("python", "2.15.1+cu132", install).executable == "python");
  CHECK(choose_python("python", std::nullopt, install).executable == "/private/python");
}

TEST_CASE("another environment never takes the place of a python that is not there", "[cli]") {
  const Install install = built_for("2.15.0+cu132");

  try {
    choose_python("/nowhere/bin/python3", install);
    FAIL("it was replaced");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::environment);
    CHECK(std::string(error.what()).find("/nowhere/bin/python3") != std::string::npos);
  }
}

TEST_CASE("a python whose torch cannot be recorded runs all the same, and it is said why", "[cli]") {
  const Install install = built_for("2.15.0+cu132");

  const PythonChoice older = choose_python("python", "2.11.0+cu130", install);
  CHECK(older.executable == "python");
  CHECK(older.note.find("built for torch 2.15") != std::string::npos);
  const PythonChoice without_cuda = choose_python("python", "2.15.0+cpu", install);
  CHECK(without_cuda.executable == "python");
  CHECK(without_cuda.note.find("without CUDA") != std::string::npos);
}
