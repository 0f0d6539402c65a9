#include "cli/experiments/forking_python.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>

#include "cli/launch/diagnosis.h"
#include "cli/process/environment.h"
#include "cli/process/files.h"
#include "cli/process/forked_program.h"
#include "cli/process/launcher.h"
#include "cli/python/install.h"
#include "cli/python/python.h"
#include "extension/environment.h"

namespace oomdiag {
namespace {

constexpr const char* kPythonPath = "PYTHONPATH";

bool has_fixes(const DiagnosisRequest& request) {
  return std::ranges::any_of(request.environment, [](const auto& one) { return one.first == variables::kFixes; });
}

/// What a fork reads when it needs it, and not what was imported.
bool is_read_late(const std::string& variable) { return variable.starts_with("OOMDIAG_") || variable == kPythonPath; }

}  // namespace

std::optional<std::vector<std::string>> python_and_script(const std::vector<std::string>& program) {
  if (program.empty() || !is_python(program.front())) return std::nullopt;
  for (std::size_t i = 1; i < program.size(); ++i) {
    if (program[i] == "-u" || program[i] == "-B") continue;
    if (!program[i].ends_with(".py") || !is_file(program[i])) return std::nullopt;
    return std::vector<std::string>(program.begin(), program.begin() + static_cast<std::ptrdiff_t>(i) + 1);
  }
  return std::nullopt;
}

std::unique_ptr<ForkingPython> ForkingPython::start(const DiagnosisRequest& request, const Install& install) {
  if (!python_and_script(request.program)) return nullptr;
  std::unique_ptr<ForkingPython> made(new ForkingPython(request, install));
  if (!made->serves(request)) return nullptr;
  const int listener = listen_for_programs(made->socket());
  if (listener >= 0) made->spawn(listener);
  if (listener >= 0) close(listener);
  return made->child_ > 0 ? std::move(made) : nullptr;
}

ForkingPython::ForkingPython(const DiagnosisRequest& request, const Install& install)
    : prepared_(request, install), command_(*python_and_script(request.program)), has_fixes_(has_fixes(request)) {
  prepared_.program().environment.emplace_back(kPythonPath, before_python_path(install.injected()));
  for (const char* of_a_run : {variables::kFixes, variables::kOutput}) {
    prepared_.program().environment.emplace_back(of_a_run, std::nullopt);
  }
  prepared_.program().arguments = command_;
  prepared_.program().arguments.insert(prepared_.program().arguments.end() - 1,
                                       install.injected() / "oomdiag_forks.py");
}

std::string ForkingPython::socket() const { return folder_.path() / "forks"; }

bool ForkingPython::serves(const DiagnosisRequest& request) const {
  return request.device.is_virtual() && !request.rank && python_and_script(request.program) == command_ &&
         has_fixes(request) == has_fixes_ &&
         std::ranges::all_of(request.environment, [](const auto& one) { return is_read_late(one.first); });
}

void ForkingPython::spawn(int listener) {
  std::vector<std::string> words = prepared_.program().arguments;
  words.insert(words.end() - 1, std::to_string(listener));
  if (has_fixes_) words.emplace_back("torch");
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return;
  child_ = fork();
  if (child_ == 0) {
    dup2(ends[0], STDIN_FILENO);
    const int nothing = open("/dev/null", O_WRONLY | O_CLOEXEC);
    dup2(nothing, STDOUT_FILENO);
    dup2(nothing, STDERR_FILENO);
    fcntl(listener, F_SETFD, 0);
    apply_environment(prepared_.program().environment);
    exec_program(words);
    _exit(127);
  }
  close(ends[0]);
  stdin_ = ends[1];
}

ForkingPython::~ForkingPython() {
  if (stdin_ >= 0) close(stdin_);
  if (child_ <= 0) return;
  kill(child_, SIGTERM);
  waitpid(child_, nullptr, 0);
}

}  // namespace oomdiag
