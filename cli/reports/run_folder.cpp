#include "cli/reports/run_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <tuple>

#include "cli/process/files.h"
#include "cli/terminal/terminal.h"
#include "extension/write_status.h"
#include "profiler/error.h"
#include "profiler/report/words/printable.h"
#include "profiler/trace/follower.h"
#include "profiler/whole_number.h"

namespace oomdiag {
namespace fs = std::filesystem;
namespace {

/// rank-2 before rank-10 before 4711.
std::tuple<bool, long, std::string> order_of(const std::string& name) {
  const bool is_rank = name.starts_with(kRankFolder);
  return {!is_rank, std::strtol(name.c_str() + (is_rank ? kRankFolder.size() : 0), nullptr, 10), name};
}

/// False if it cannot be written. A .gitignore keeps the runs out of the program's repository.
bool make_runs_folder(const fs::path& runs) {
  std::error_code error;
  if (fs::create_directory(runs, error)) std::ofstream(runs / ".gitignore") << "*\n";
  return !error && fs::is_directory(runs, error) && access(runs.c_str(), W_OK | X_OK) == 0;
}

}  // namespace

fs::path choose_base(const std::string& requested) {
  std::error_code error;
  if (!requested.empty()) {
    fs::create_directories(requested, error);
    if (!error && access(requested.c_str(), W_OK | X_OK) != 0) error.assign(errno, std::generic_category());
    if (error) {
      throw Error(ErrorKind::environment, fmt::format("cannot write into '{}': {}", requested, error.message()),
                  "give another folder: --folder DIR");
    }
    return fs::absolute(requested);
  }
  fs::path runs = fs::absolute(kRunsFolder, error);
  if (!error && make_runs_folder(runs)) return runs;
  fs::path temporary = fs::temp_directory_path(error);
  if (error || access(temporary.c_str(), W_OK | X_OK) != 0) {
    throw Error(ErrorKind::environment, "neither the current nor the temporary folder can be written",
                "give one that can: --folder DIR");
  }
  say(fmt::format("cannot write into the current folder; the run goes to {}", temporary.string()));
  return temporary;
}

fs::path make_run_folder(const fs::path& base, pid_t pid) {
  constexpr int kMaxRunsOfOnePid = 10000;
  for (int number = 1; number < kMaxRunsOfOnePid; ++number) {
    fs::path folder = base / fmt::format("oomdiag-{}{}", pid, number == 1 ? "" : fmt::format("-{}", number));
    if (mkdir(folder.c_str(), 0700) == 0) return folder;  // a command line may hold secrets: nobody else's business
    if (errno != EEXIST) {
      const std::error_code error(errno, std::generic_category());
      throw Error(ErrorKind::environment, fmt::format("cannot make '{}': {}", folder.string(), error.message()),
                  "give another folder: --folder DIR");
    }
  }
  throw Error(ErrorKind::environment, fmt::format("'{}' is full of old runs", base.string()),
              "remove some oomdiag-* folders");
}

bool is_run_folder_name(std::string_view name) {
  constexpr std::string_view kStart = "oomdiag-";
  if (!name.starts_with(kStart)) return false;
  name.remove_prefix(kStart.size());
  const size_t dash = name.find('-');
  return is_number(name.substr(0, dash)) && (dash == name.npos || is_number(name.substr(dash + 1)));
}

fs::path newest_run() {
  fs::path newest;
  fs::file_time_type changed{};
  for (const fs::path& base : {fs::path(kRunsFolder), fs::path(".")}) {
    std::error_code error;
    for (fs::directory_iterator entry(base, error), end; !error && entry != end; entry.increment(error)) {
      std::error_code ignored;
      if (!is_run_folder_name(entry->path().filename().string()) || !entry->is_directory(ignored)) continue;
      const fs::file_time_type time = entry->last_write_time(ignored);
      if (newest.empty() || time > changed) newest = entry->path().lexically_normal(), changed = time;
    }
  }
  return newest;
}

std::vector<fs::path> find_traces(const fs::path& folder) {
  std::vector<fs::path> traces;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (entry.is_directory(ignored) && is_there(entry.path() / "trace")) {
      traces.push_back(entry.path() / "trace");
    }
  }
  std::sort(traces.begin(), traces.end(), [](const fs::path& a, const fs::path& b) {
    return order_of(a.parent_path().filename()) < order_of(b.parent_path().filename());
  });
  if (is_there(folder / "trace")) traces.insert(traces.begin(), folder / "trace");
  return traces;
}

std::unique_ptr<TraceFollower> follow_run(const fs::path& folder) {
  const std::vector<fs::path> traces = find_traces(folder);
  return traces.empty() ? nullptr : TraceFollower::open(traces.front());
}

namespace {

/// Why no file can be written into the folder, or empty.
std::string find_obstacle(const fs::path& folder) {
  const fs::path probe = folder / "probe";
  const int file = open(probe.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) return std::strerror(errno);
  const std::string page(4096, ' ');
  const bool is_written = write(file, page.data(), page.size()) == static_cast<ssize_t>(page.size());
  const int error = errno;
  close(file);
  unlink(probe.c_str());
  return is_written ? "" : std::strerror(error);
}

}  // namespace

Leftovers look_into(const fs::path& folder) {
  const bool has_trace = !find_traces(folder).empty();
  Leftovers left{.was_loaded = has_trace || is_there(folder / "loaded"), .has_trace = has_trace};
  if (!has_trace) left.why_not_writable = find_obstacle(folder);
  std::ifstream loaded(folder / "loaded");
  for (std::string line; std::getline(loaded, line);) {
    if (line == kRecorderLoaded) {
      left.has_asked = true;
    } else if (left.why_not_recorded.empty()) {
      left.why_not_recorded = line;
    }
  }
  return left;
}

fs::path run_config_file(const fs::path& folder) {
  const fs::path file = folder / kRunConfigFile;
  const bool is_of_rank = folder.filename().string().starts_with(kRankFolder);
  return is_of_rank && !is_there(file) ? folder.parent_path() / kRunConfigFile : file;
}

bool is_run_file(std::string_view name) {
  constexpr std::string_view kPart = ".part";  // see write_whole()
  if (name.ends_with(kPart)) name.remove_suffix(kPart.size());
  return std::ranges::find(kRunFiles, name) != kRunFiles.end();
}

void remove_shared_files(const fs::path& folder) {
  std::error_code ignored;
  for (const char* name : {"loaded", "gpus"}) fs::remove(folder / name, ignored);
  fs::remove_all(folder / kSharedFolder, ignored);
}

void remove_empty_run(const fs::path& folder) {
  std::error_code ignored;
  remove_shared_files(folder);
  fs::remove(folder / "output.txt", ignored);
  fs::remove(folder, ignored);  // fails, as it should, if there is anything else in it
  const fs::path runs = folder.parent_path();
  if (runs.filename() != kRunsFolder) return;
  const auto files = std::distance(fs::directory_iterator(runs, ignored), fs::directory_iterator());
  if (files == 1 && fs::remove(runs / ".gitignore", ignored)) fs::remove(runs, ignored);
}

std::string last_lines(const fs::path& output) {
  constexpr std::size_t kMaxLines = 5;
  std::ifstream stream(output);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) {
    if (!line.empty()) lines.push_back(line);
    if (lines.size() > kMaxLines) lines.erase(lines.begin());
  }
  std::string text;
  for (const std::string& line : lines) text += "  " + line + "\n";
  return text;
}

namespace {

/// "ValueError: …", of a rank too: "[rank1]: torch.AcceleratorError: CUDA error: …".
bool is_python_error(std::string_view line) {
  if (line.starts_with("[rank")) line.remove_prefix(std::min(line.size(), line.find("]: ") + 3));
  const std::size_t colon = line.find(':');
  const std::string_view name = line.substr(0, colon);
  return colon != line.npos && (name.ends_with("Error") || name.ends_with("Exception")) && name.find(' ') == name.npos;
}

}  // namespace

std::string last_line(const fs::path& output) {
  std::ifstream stream(output);
  std::string last, error;
  bool is_of_rank = false;
  for (std::string line; std::getline(stream, line);) {
    if (line.find("ChildFailedError") != line.npos) is_of_rank = true;
    if (!is_of_rank && is_python_error(line)) error = line;
    if (line.find_first_not_of(" \t\r=-*") != line.npos) last = line;
  }
  constexpr std::size_t kMaxColumns = 300;
  return printable(is_of_rank && !error.empty() ? error : last, kMaxColumns);
}

std::string as_typed(const fs::path& path) {
  std::error_code error;
  const fs::path here = fs::current_path(error);
  const fs::path relative = error ? path : path.lexically_relative(here);
  return relative.empty() || *relative.begin() == ".." ? path.string() : relative.string();
}

}  // namespace oomdiag
