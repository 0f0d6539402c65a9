#include "cli/python.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <iterator>

#include "cli/launcher.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

/// torch's version without `import torch`, which takes a second; empty where it has none, nullopt where the interpreter
/// cannot be started.
std::optional<std::string> ask_torch_version(const std::string& python) {
  const std::optional<std::string> origin = output_of(
      {python, "-c",
       "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s and s.origin else '', end='')"});
  if (!origin || origin->empty()) return origin;
  std::ifstream file(std::filesystem::path(*origin).parent_path() / "version.py");
  return read_torch_version(std::string(std::istreambuf_iterator<char>(file), {})).value_or("");
}

/// Names that mean "any Python": Debian has no `python`, and who has none at all is served by the private one.
bool names_any_python(std::string_view wanted) { return wanted == "python" || wanted == "python3"; }

}  // namespace

bool is_python(std::string_view program) {
  std::string_view name = program.substr(program.rfind('/') + 1);
  if (!name.starts_with("python")) return false;
  name.remove_prefix(std::string_view("python").size());
  return std::all_of(name.begin(), name.end(),
                     [](unsigned char letter) { return letter == '.' || std::isdigit(letter) != 0; });
}

std::optional<std::string> read_torch_version(std::string_view version_py) {
  const std::size_t line = version_py.find("__version__ =");
  if (line == std::string_view::npos) return std::nullopt;
  const std::size_t begin = version_py.find_first_of("'\"", line);
  if (begin == std::string_view::npos) return std::nullopt;
  const std::size_t end = version_py.find(version_py[begin], begin + 1);
  if (end == std::string_view::npos) return std::nullopt;
  return std::string(version_py.substr(begin + 1, end - begin - 1));
}

PythonChoice choose_python(const std::string& wanted, const Install& install) {
  const std::optional<std::string> version = ask_torch_version(wanted);
  if (!version && !names_any_python(wanted)) {
    throw Error(ErrorKind::environment, fmt::format("'{}' is no Python that can be started", wanted),
                "see: which -a python3");
  }
  const bool has_torch = version && !version->empty();
  return choose_python(wanted, has_torch ? version : std::nullopt, install);
}

PythonChoice choose_python(const std::string& wanted, const std::optional<std::string>& torch_version,
                           const Install& install) {
  if (!torch_version) {
    return {install.python.string(), fmt::format("'{}' has no torch; running {} with torch {}", wanted,
                                                 install.python.string(), install.torch_version)};
  }
  if (torch_version->find("+cpu") != std::string::npos) {
    return {wanted,
            fmt::format("running your '{}' with torch {}, which was built without CUDA: there will be nothing to "
                        "record. Install the CUDA build, or take the private python: {}",
                        wanted, *torch_version, install.python.string())};
  }
  if (minor_of(*torch_version) != minor_of(install.torch_version)) {
    return {wanted,
            fmt::format("running your '{}' with torch {} without recording: this oomdiag was built for torch {}. "
                        "Build for yours by OOMDIAG_TORCH=<its site-packages/torch> scripts/build, or take the "
                        "private python: {}",
                        wanted, *torch_version, minor_of(install.torch_version), install.python.string())};
  }
  return {wanted, fmt::format("running your '{}' with torch {}", wanted, *torch_version)};
}

}  // namespace oomdiag
