#include "cli/python/python.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "cli/process/environment.h"
#include "cli/process/files.h"
#include "cli/process/launcher.h"
#include "cli/python/first_use.h"
#include "cli/python/install.h"
#include "cli/terminal/terminal.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

namespace fs = std::filesystem;

constexpr const char* kQuestion =
    "import importlib.util as u, sys; s = u.find_spec('torch')\n"
    "print(sys.implementation.cache_tag)\n"
    "print(s.origin if s and s.origin else '')";

/// Names that mean "any Python": Debian has no `python`, and who has none at all is served by the private one. Any other name,
/// a path above all, means one environment.
bool names_any_python(std::string_view interpreter) { return interpreter == "python" || interpreter == "python3"; }

/// Another environment in the place of one that was named would be another program: its packages are not there.
void check_named_python(const std::string& interpreter, const std::optional<TorchOfPython>& torch,
                        const Install& install) {
  const bool has_replacement = !install.torch_version.empty();
  if (!torch && (!names_any_python(interpreter) || !has_replacement)) {
    throw Error(ErrorKind::environment, fmt::format("'{}' is no Python that can be started", interpreter),
                "see: which -a python3");
  }
  if (torch && torch->folder.empty() && !names_any_python(interpreter) && has_replacement) {
    throw Error(ErrorKind::environment, fmt::format("'{}' has no torch", interpreter),
                fmt::format("install it there: {} -m pip install torch; or name {}, which has torch {}", interpreter,
                            install.python.string(), install.torch_version));
  }
}

/// The text between quotes behind the first ':' or '=' that follows `name` at the beginning of a line; empty for None.
std::string value_of(std::string_view text, std::string_view name) {
  for (std::size_t at = text.find(name); at != text.npos; at = text.find(name, at + 1)) {
    const bool begins_line = at == 0 || text[at - 1] == '\n';
    const char next = at + name.size() < text.size() ? text[at + name.size()] : '\n';
    if (!begins_line || (next != ' ' && next != ':' && next != '=')) continue;
    const std::string_view line = text.substr(at, text.find('\n', at) - at);
    const std::size_t equals = line.find('=');
    const std::size_t begin = equals == line.npos ? equals : line.find_first_of("'\"", equals);
    if (begin == line.npos) continue;
    const std::size_t end = line.find(line[begin], begin + 1);
    return end == line.npos ? "" : std::string(line.substr(begin + 1, end - begin - 1));
  }
  return {};
}

fs::path find_in_path(const std::string& program) {
  if (program.find('/') != program.npos) return program;
  std::istringstream folders(environment("PATH"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (is_file(fs::path(folder) / program)) return fs::path(folder) / program;
  }
  return {};
}

void forget_torch(Install& install, const std::string& why) {
  install.recorder.clear();
  install.contents.clear();
  install.no_recorder = why;
}

/// Takes the recorder for another torch than that of the build.
void take_own_recorder(const TorchOfPython& torch, Install& install) {
  install.torch_version = torch.version;
  try {
    const FirstUse built = provide_recorder(torch, install);
    install.recorder = built.recorder;
    install.contents = built.contents;
    install.architectures = built.architectures;
  } catch (const Error& error) {
    forget_torch(install, error.what());
    say(fmt::format("warning: {}", error.what()));
    if (!error.hint().empty()) complain(fmt::format("hint: {}\n", error.hint()));
  }
}

}  // namespace

bool is_python(std::string_view program) {
  std::string_view name = program.substr(program.rfind('/') + 1);
  if (!name.starts_with("python")) return false;
  name.remove_prefix(std::string_view("python").size());
  return std::all_of(name.begin(), name.end(),
                     [](unsigned char letter) { return letter == '.' || std::isdigit(letter) != 0; });
}

void read_version_py(std::string_view text, TorchOfPython& torch) {
  torch.version = value_of(text, "__version__");
  torch.cuda = value_of(text, "cuda");
  torch.is_rocm = !value_of(text, "hip").empty();
}

std::optional<TorchOfPython> look_at_torch(const std::string& python) {
  const std::optional<std::string> said = output_of({python, "-c", kQuestion});
  if (!said) return std::nullopt;
  TorchOfPython torch{.python = python};
  std::istringstream lines(*said);
  std::string origin;
  std::getline(lines, torch.tag);
  std::getline(lines, origin);
  if (origin.empty()) return torch;
  torch.folder = fs::path(origin).parent_path();
  read_version_py(read_file(torch.folder / "version.py"), torch);
  return torch;
}

PythonChoice choose_python(const std::string& interpreter, const TorchOfPython& torch, const Install& install) {
  if (torch.folder.empty() && install.torch_version.empty()) {
    const std::string why = fmt::format("'{}' has no torch", interpreter);
    return {interpreter, why + ": there will be nothing to record", false, why};
  }
  if (torch.folder.empty()) {
    return {install.python.string(), fmt::format("'{}' has no torch; running {} with torch {}", interpreter,
                                                 install.python.string(), install.torch_version)};
  }
  const std::string running = fmt::format("running your '{}' with torch {}", interpreter, torch.version);
  if (torch.is_rocm || torch.cuda.empty() || torch.version.find("+cpu") != std::string::npos) {
    const std::string why = torch.is_rocm ? "which was built for ROCm, and oomdiag knows CUDA"
                                          : "which was built without CUDA: there will be nothing to record";
    return {interpreter, fmt::format("{}, {}. Install the CUDA build: pip install torch", running, why), false,
            fmt::format("torch {} has no CUDA", torch.version)};
  }
  return {interpreter, running, minor_of(torch.version) != minor_of(install.torch_version)};
}

std::string read_interpreter(std::string_view beginning) {
  if (!beginning.starts_with("#!")) return {};
  // pip writes '''exec' "/path with space/bin/python" into the second line where the first would be too long.
  std::string_view lines = beginning.substr(0, beginning.find('\n', beginning.find('\n') + 1));
  const std::size_t quoted = lines.find("'''exec' ");
  lines = quoted == lines.npos ? lines.substr(2, lines.find('\n') - 2) : lines.substr(quoted + 9);
  if (lines.starts_with('"')) lines = lines.substr(1, lines.find('"', 1) - 1);
  std::istringstream words{quoted == lines.npos ? std::string(lines) : std::string()};
  if (is_python(lines)) return std::string(lines);
  for (std::string word; words >> word;) {
    if (is_python(word)) return word;
  }
  return {};
}

std::string interpreter_of(const std::string& program) {
  std::ifstream file(find_in_path(program), std::ios::binary);
  std::string beginning(1024, '\0');
  file.read(beginning.data(), static_cast<std::streamsize>(beginning.size()));
  beginning.resize(static_cast<std::size_t>(std::max(file.gcount(), std::streamsize{0})));
  return read_interpreter(beginning);
}

std::string prepare_torch(const std::string& program, Install& install) {
  const bool is_itself = is_python(program);
  std::string interpreter = is_itself ? program : interpreter_of(program);
  const bool is_guess = interpreter.empty();
  if (is_guess && !install.torch_version.empty()) return program;  // the torch of the build, as good a guess as any
  if (is_guess) interpreter = install.python.string();
  const std::optional<TorchOfPython> torch = look_at_torch(interpreter);
  if (is_itself) check_named_python(interpreter, torch, install);
  const PythonChoice choice = choose_python(interpreter, torch.value_or(TorchOfPython{}), install);
  if (is_itself) say(choice.note);
  if (!choice.no_recorder.empty()) forget_torch(install, choice.no_recorder);
  if (choice.needs_own_recorder) take_own_recorder(*torch, install);
  if (torch && !is_guess) install.cuda_major = std::atoi(torch->cuda.c_str());
  return is_itself ? choice.executable : program;
}

}  // namespace oomdiag
