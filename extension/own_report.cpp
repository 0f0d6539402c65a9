#include "extension/own_report.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <sstream>

#include "extension/environment.h"
#include "extension/record/allocator_hooks.h"
#include "extension/record/session.h"
#include "extension/reports.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

/// Where the launcher says, else beside this library.
std::string find_library() {
  if (const char* named = variables::text(variables::kReports); *named != '\0') return named;
  Dl_info own{};
  dladdr(reinterpret_cast<void*>(ask_own_report), &own);
  return (std::filesystem::path(own.dli_fname == nullptr ? "" : own.dli_fname).parent_path() / kReportsLibrary)
      .string();
}

ReportFunction find_function() {
  void* library = dlopen(find_library().c_str(), RTLD_NOW | RTLD_LOCAL);
  const auto found = library == nullptr ? nullptr : reinterpret_cast<ReportFunction>(dlsym(library, kReportFunction));
  if (found == nullptr) {
    throw Error(ErrorKind::environment, std::string("no report can be made here: ") + dlerror(),
                "name the library in OOMDIAG_REPORTS, or take oomdiag explain");
  }
  return found;
}

[[noreturn]] void fail(int code, const std::string& said) {
  const size_t end = said.find('\n');
  throw Error(static_cast<ErrorKind>(code - 1), said.substr(0, end), end == said.npos ? "" : said.substr(end + 1));
}

}  // namespace

std::string ask_own_report(const char* what) {
  check_not_forked();
  if (the_session == nullptr) {
    throw Error(ErrorKind::usage, "nothing is recorded in this process",
                "call start() first, and use CUDA; or run the program by oomdiag run");
  }
  write_memory_stats();
  static const ReportFunction ask = find_function();
  char* answer = nullptr;
  const int code = ask(the_session->trace().c_str(), what, &answer);
  const std::unique_ptr<char, decltype(&std::free)> owner(answer, std::free);
  const std::string said = answer == nullptr ? "" : answer;
  if (code != 0) fail(code, said);
  return said;
}

std::map<std::string, int64_t> ask_own_figures(const char* what) {
  std::map<std::string, int64_t> figures;
  std::istringstream lines(ask_own_report(what));
  int64_t figure = 0;
  for (std::string name; lines >> figure && lines.get() && std::getline(lines, name);) figures[name] = figure;
  return figures;
}

}  // namespace oomdiag
