#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <fstream>
#include <memory>
#include <sstream>
#include <thread>

#include "cli/commands/commands.h"
#include "cli/reports/alive.h"
#include "cli/reports/reports.h"
#include "cli/reports/run_folder.h"
#include "cli/terminal/help.h"
#include "cli/terminal/terminal.h"
#include "profiler/error.h"
#include "profiler/explain/findings.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/report/report.h"
#include "profiler/report/text/table.h"
#include "profiler/report/words/printable.h"
#include "profiler/trace/trace.h"
#include "profiler/whole_number.h"

// The program does nothing for it: what is shown is its trace, replayed now and again. Between two looks lies at least ten
// times what a look takes.

namespace oomdiag {
namespace fs = std::filesystem;
namespace {

using Clock = std::chrono::steady_clock;

struct WatchOptions {
  std::string target;
  double every_seconds = 2;
  bool once = false;
};

/// The trace that a process writes, as its mappings show.
fs::path find_trace_of(const std::string& pid) {
  std::ifstream maps("/proc/" + pid + "/maps");
  if (!maps)
    throw Error(ErrorKind::input, fmt::format("no oomdiag run found for process {}", pid), "give its run folder");
  for (std::string line; std::getline(maps, line);) {
    const size_t path = line.find('/');
    if (path != line.npos && line.ends_with("/trace") && fs::exists(line.substr(path))) return line.substr(path);
  }
  throw Error(ErrorKind::input, fmt::format("process {} writes no trace", pid),
              "start it with oomdiag run, or give the folder of its run");
}

std::vector<fs::path> traces_of(const std::string& target) {
  if (is_number(target) && !fs::exists(target)) return {find_trace_of(target)};
  if (!fs::is_directory(target)) return {target};
  std::vector<fs::path> traces = find_traces(target);
  if (traces.empty())
    throw Error(ErrorKind::input, fmt::format("'{}' holds no trace", target), "give a run folder or a pid");
  return traces;
}

bool any_runs(const std::vector<fs::path>& traces) {
  return std::ranges::any_of(traces, [](const fs::path& trace) { return has_mapped(read_process(trace).pid, trace); });
}

std::string row_of(const std::string& who, const Report& report, const ReportOfDevice& device) {
  const ReportPoint now = device.timeline.empty() ? ReportPoint{} : device.timeline.back();
  const int64_t growth = growth_of(device);
  const int64_t free = available_bytes(device) - now.reserved_bytes;
  return fmt::format("  {:<14}{:>7}{:>11}{:>11}{:>11}{:>11}{:>11}\n", who, report.steps, with_unit(now.allocated_bytes),
                     with_unit(now.reserved_bytes), with_unit(device.peak.allocated_bytes),
                     with_unit(std::max<int64_t>(0, free)), growth == 0 ? "none" : with_unit(growth));
}

// The largest categories at the peak, on one line.
std::string categories_of(const ReportOfDevice& device) {
  constexpr size_t kMax = 4;
  Figures categories = device.categories;
  std::ranges::stable_sort(categories, [](const auto& a, const auto& b) { return a.second > b.second; });
  std::string text;
  for (size_t i = 0; i < std::min(categories.size(), kMax) && categories[i].second > 0; ++i) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", in_words(categories[i].first),
                        with_unit(categories[i].second));
  }
  return text.empty() ? "" : fmt::format("  at the peak   {}\n", text);
}

std::string look(const std::vector<fs::path>& traces, bool running) {
  std::string rows, categories;
  for (const fs::path& trace : traces) {
    const Report report = load_report(trace);
    for (const ReportOfDevice& device : report.devices) {
      const std::string who = report.world_size > 1       ? fmt::format("rank {}", report.rank)
                              : report.devices.size() > 1 ? fmt::format("GPU {}", device.device.index)
                                                          : "program";
      rows += row_of(who, report, device);
      if (categories.empty()) categories = categories_of(device);
    }
  }
  if (rows.empty()) rows = "  nothing was allocated yet\n";
  return fmt::format("oomdiag: {}\n  {:<14}{:>7}{:>11}{:>11}{:>11}{:>11}{:>11}\n", running ? "runs" : "has ended", "",
                     "step", "allocated", "reserved", "peak", "free", "per step") +
         rows + categories;
}

/// Of a terminal, where a line that is too long takes several.
std::size_t count_rows(const std::string& text, std::size_t columns) {
  std::istringstream lines(text);
  std::size_t rows = 0;
  for (std::string line; std::getline(lines, line);) {
    rows += columns == 0 ? 1 : std::max<std::size_t>(1, (count_columns(line) + columns - 1) / columns);
  }
  return rows;
}

int watch(const WatchOptions& options) {
  const std::vector<fs::path> traces = traces_of(options.target);
  const OutputCapabilities output = output_capabilities(STDOUT_FILENO);
  std::size_t lines = 0;
  while (true) {
    const auto begin = Clock::now();
    const bool running = any_runs(traces);
    const std::string text = look(traces, running);
    write_out((output.moves_cursor && lines > 0 ? fmt::format("\033[{}A\033[J", lines) : std::string()) + text);
    finish_output();
    lines = count_rows(text, output.columns);
    if (options.once || !running) return 0;
    const auto least =
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options.every_seconds));
    std::this_thread::sleep_for(std::max(least, 10 * (Clock::now() - begin)));
  }
}

}  // namespace

void add_watch(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<WatchOptions>();
  CLI::App& command = *app.add_subcommand("watch", "the memory of a program that runs");
  set_help(command,
           {.example = "oomdiag watch 4711",
            .about = "Shows step, allocated, reserved and free bytes and the growth per step of a program that "
                     "oomdiag run started, from its trace, until it ends. The program is not touched.",
            .usage = "oomdiag watch [OPTIONS] PID|FOLDER"});
  command.add_option("PID|FOLDER", options->target, "the process, or the folder of its run")->type_name("")->required();
  command.add_option("--every", options->every_seconds, "how often to look; default 2")
      ->type_name("SECONDS")
      ->check(number_in(0.1, 3600));
  command.add_flag("--once", options->once, "one look only");
  command.callback([options, &chosen] { chosen = [options] { return watch(*options); }; });
}

}  // namespace oomdiag
