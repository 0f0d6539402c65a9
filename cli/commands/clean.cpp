#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <ctime>
#include <memory>

#include "cli/commands/commands.h"
#include "cli/process/files.h"
#include "cli/python/cache.h"
#include "cli/reports/alive.h"
#include "cli/reports/run_folder.h"
#include "cli/terminal/help.h"
#include "cli/terminal/terminal.h"
#include "profiler/counted.h"
#include "profiler/error.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/report/words/printable.h"
#include "profiler/trace/trace.h"
#include "profiler/whole_number.h"

// Takes old run folders away. Only what a run writes is ever removed, file by file: a folder that holds anything else, or
// belongs to somebody else, or is written to by a program that runs, stays as it is.

namespace oomdiag {
namespace fs = std::filesystem;
namespace {

struct CleanOptions {
  std::string folder{};  ///< empty: the current one and kRunsFolder
  double older_than_days = -1;
  bool yes = false;
  bool cache = false;
};

/// A run folder, and why it stays, or empty.
struct Found {
  fs::path path;
  int64_t bytes = 0;  ///< on the disk
  double days = 0;    ///< since it was last written
  std::string stays{};
  std::vector<fs::path> files{}, folders{};  ///< of it, in the order in which they go
};

/// "<32 digits>-mail": what ranks shared (kSharedFolder) when `oomdiag run` itself was killed.
bool is_shared_by_ranks(std::string_view name) {
  constexpr size_t kDigits = 32;
  return name.size() > kDigits && name[kDigits] == '-' &&
         name.substr(0, kDigits).find_first_not_of("0123456789abcdef") == name.npos;
}

bool is_of_process(std::string_view name) {
  return is_number(name.starts_with(kRankFolder) ? name.substr(kRankFolder.size()) : name);
}

bool is_alive(const fs::path& trace) {
  try {
    return has_mapped(read_process(trace).pid, trace);
  } catch (const Error&) {
    return false;  // a trace that cannot be read belongs to no process
  }
}

void look_into_folder(const fs::path& folder, Found& found, bool is_inner) {
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    struct stat info {};
    if (lstat(entry->path().c_str(), &info) != 0) continue;
    found.bytes += int64_t{info.st_blocks} * 512;
    const double age = std::difftime(std::time(nullptr), info.st_mtime) / 86400;
    found.days = std::min(found.days, age);
    const bool is_shared = folder.filename() == kSharedFolder && is_shared_by_ranks(name);
    if (S_ISREG(info.st_mode) && (is_shared || is_run_file(name))) {
      if (name == "trace" && is_alive(entry->path())) found.stays = "its program still runs";
      found.files.push_back(entry->path());
    } else if (S_ISDIR(info.st_mode) && !is_inner && (is_of_process(name) || name == kSharedFolder)) {
      look_into_folder(entry->path(), found, true);
      found.folders.push_back(entry->path());
    } else {
      found.stays = fmt::format("it holds '{}', which no run writes", name);
    }
  }
  if (error) found.stays = error.message();
}

void find_runs(const fs::path& base, std::vector<Found>& runs) {
  std::error_code error;
  for (fs::directory_iterator entry(base, error), end; !error && entry != end; entry.increment(error)) {
    struct stat info {};
    const bool is_ours = is_run_folder_name(entry->path().filename().string()) &&
                         lstat(entry->path().c_str(), &info) == 0 && S_ISDIR(info.st_mode);
    if (!is_ours) continue;
    Found& run = runs.emplace_back(Found{.path = entry->path()});
    run.days = std::difftime(std::time(nullptr), info.st_mtime) / 86400;
    if (info.st_uid != geteuid()) run.stays = "it belongs to somebody else";
    if (run.stays.empty()) look_into_folder(run.path, run, false);
    run.folders.push_back(run.path);
  }
  if (error) throw Error(ErrorKind::input, fmt::format("cannot read '{}': {}", base.string(), error.message()));
}

/// Those in `folder`, the oldest first.
std::vector<Found> find_runs(const std::string& folder) {
  std::vector<Found> runs;
  find_runs(folder.empty() ? "." : folder, runs);
  if (folder.empty() && is_folder(kRunsFolder)) find_runs(kRunsFolder, runs);
  std::ranges::sort(runs, std::greater{}, &Found::days);
  return runs;
}

bool remove(const Found& run) {
  std::error_code error;
  for (const fs::path& file : run.files) fs::remove(file, error);
  for (const fs::path& folder : run.folders) fs::remove(folder, error);  // fails, as it should, if anything came in
  return !error;
}

/// What was built for the torch of each environment, and what Inductor and Triton made for virtual GPUs: it is rebuilt
/// when it is needed.
int clean_cache() {
  const fs::path cache = cache_folder();
  std::error_code error;
  int64_t bytes = 0;
  for (fs::recursive_directory_iterator entry(cache, error), end; !error && entry != end; entry.increment(error)) {
    std::error_code ignored;
    if (entry->is_regular_file(ignored)) bytes += static_cast<int64_t>(entry->file_size(ignored));
  }
  error.clear();
  fs::remove_all(cache, error);
  if (error) {
    throw Error(ErrorKind::environment, fmt::format("cannot remove '{}': {}", cache.string(), error.message()));
  }
  write_out(fmt::format("oomdiag: {} removed from {}\n", with_unit(bytes), printable_lines(cache.string())));
  return 0;
}

int clean(const CleanOptions& options) {
  if (options.cache) return clean_cache();
  const std::vector<Found> runs = find_runs(options.folder);
  const bool removes = options.yes || options.older_than_days >= 0;
  std::string text;
  int64_t bytes = 0, count = 0, young = 0;
  bool failed = false;
  for (const Found& run : runs) {
    const std::string age = run.days < 1 ? "today" : fmt::format("{:.0f} days old", run.days);
    std::string what = run.stays.empty() ? (removes ? "removed" : "") : "stays: " + run.stays;
    if (run.days < options.older_than_days && run.stays.empty()) {
      ++young;
      continue;
    }
    bool goes = what.empty() || what == "removed";
    if (goes && removes && !remove(run)) {
      what = "could not be removed";
      goes = false;
      failed = true;
    }
    bytes += goes ? run.bytes : 0;
    count += goes ? 1 : 0;
    text +=
        fmt::format("  {:<34}{:>12}  {:<14}{}\n", as_typed(fs::absolute(run.path)), with_unit(run.bytes), age, what);
  }
  const std::string sum =
      count == 0 ? "nothing to remove" : fmt::format("{}, {}", counted(count, "run"), with_unit(bytes));
  text =
      fmt::format("oomdiag: {}{}\n", sum, removes && count > 0 ? " removed" : "") + (text.empty() ? "" : "\n" + text);
  if (young > 0)
    text += fmt::format("\n  {} of the last {:g} days {}\n", counted(young, "run"), options.older_than_days,
                        young == 1 ? "stays" : "stay");
  if (!removes && count > 0)
    text += "\n  next: oomdiag clean --yes, or --older-than 7 for those of last week and before\n";
  write_out(printable_lines(text));
  return failed ? 1 : 0;
}

}  // namespace

void add_clean(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<CleanOptions>();
  CLI::App& command = *app.add_subcommand("clean", "remove old run folders");
  set_help(command,
           {.example = "oomdiag clean --older-than 7",
            .about = "Lists the run folders (oomdiag-<pid>) in a folder and, with --yes or an age, removes them. What\n"
                     "no run wrote is never touched.",
            .usage = "oomdiag clean [OPTIONS] [DIR]"});
  command.add_option("DIR", options->folder, "where they are; default: oomdiag-runs and this folder")->type_name("");
  command.add_option("--older-than", options->older_than_days, "remove those that are older than so many days")
      ->type_name("DAYS")
      ->check(number_in(0, 1e6));
  command.add_flag("--yes", options->yes, "remove all of them");
  command.add_flag("--cache", options->cache,
                   "remove instead what was built for each torch, and compiled for virtual GPUs");
  command.callback([options, &chosen] { chosen = [options] { return clean(*options); }; });
}

}  // namespace oomdiag
