#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <memory>

#include "cli/commands/commands.h"
#include "cli/process/environment.h"
#include "cli/reports/reports.h"
#include "cli/terminal/help.h"
#include "cli/terminal/sizes.h"
#include "cli/terminal/terminal.h"
#include "profiler/diff/budget.h"
#include "profiler/error.h"
#include "profiler/report/report.h"

namespace oomdiag {
namespace {

struct CheckOptions {
  std::string path, max_allocated, max_reserved, max_growth, baseline, tolerance, junit;
  bool github = false;
};

/// "1MiB/step", "1MiB" or "0".
int64_t parse_growth(std::string text) {
  constexpr std::string_view kPerStep = "/step";
  if (text.ends_with(kPerStep)) text.resize(text.size() - kPerStep.size());
  return text == "0" ? 0 : parse_bytes(text);
}

/// 0.02 of "2%" or "2 %".
double parse_percent(std::string_view text) {
  double percent = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, percent, std::chars_format::fixed);
  std::string_view unit(rest, static_cast<size_t>(end - rest));
  if (unit.starts_with(' ')) unit.remove_prefix(1);
  if (error != std::errc{} || (unit != "%" && !unit.empty()) || !(percent >= 0) || percent > 1000) {
    throw Error(ErrorKind::usage, fmt::format("--tolerance {} is not a percentage", text), "write it as 2%");
  }
  return percent / 100;
}

/// Exit code 1 says that a budget is not kept: what cannot be read is another matter.
Report load_named(const std::string& path) {
  try {
    return load_report(path);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::input) throw;
    throw Error(ErrorKind::usage, error.what(), error.hint());
  }
}

Budgets read_budgets(const CheckOptions& options) {
  Budgets budgets;
  if (!options.max_allocated.empty()) budgets.max_allocated_bytes = parse_bytes(options.max_allocated);
  if (!options.max_reserved.empty()) budgets.max_reserved_bytes = parse_bytes(options.max_reserved);
  if (!options.max_growth.empty()) budgets.max_growth_bytes = parse_growth(options.max_growth);
  if (!options.tolerance.empty()) budgets.tolerance = parse_percent(options.tolerance);
  if (!options.baseline.empty()) budgets.baseline = load_named(options.baseline);
  if (!options.tolerance.empty() && !budgets.baseline) {
    throw Error(ErrorKind::usage, "--tolerance goes with --baseline", "as in: --baseline old.json --tolerance 2%");
  }
  return budgets;
}

int check_file(const CheckOptions& options) {
  const Budgets budgets = read_budgets(options);
  check_writable(options.junit, "--junit");
  const std::vector<Verdict> verdicts = check(load_named(options.path), budgets);
  std::string text;
  for (const Verdict& one : verdicts) {
    text += fmt::format("{} {:<18} {}\n", one.kept ? "ok  " : "FAIL", one.budget, one.words);
  }
  if (options.github || environment("GITHUB_ACTIONS") == "true") {
    text += to_github(verdicts, options.path);
  }
  write_out(text);
  if (!options.junit.empty()) write_whole(to_junit(verdicts, options.path), options.junit);
  return std::ranges::all_of(verdicts, &Verdict::kept) ? 0 : 1;
}

}  // namespace

void add_check(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<CheckOptions>();
  CLI::App& command = *app.add_subcommand("check", "hold a run against budgets, for CI");
  set_help(command,
           {.example = "oomdiag check oomdiag-4711 --max-allocated 20GiB --max-growth 1MiB/step",
            .about = "Prints a line for each budget; exit code 1 if one is not kept, or if the run itself ran out "
                     "of memory, 2 if a file cannot be read. With several GPUs or ranks the highest figure counts.",
            .usage = "oomdiag check [OPTIONS] FILE"});
  add_source(command, options->path);
  command.add_option("--max-allocated", options->max_allocated, "the most that may be allocated at once")
      ->type_name("SIZE");
  command.add_option("--max-reserved", options->max_reserved, "the most that may be reserved at once")
      ->type_name("SIZE");
  command.add_option("--max-growth", options->max_growth, "growth from step to step, as in 1MiB/step, or 0")
      ->type_name("SIZE");
  command.add_option("--baseline", options->baseline, "an earlier report: nothing may be above it")->type_name("FILE");
  command.add_option("--tolerance", options->tolerance, "… by more than this share; default 2%")->type_name("N%");
  command.add_option("--junit", options->junit, "write the verdicts as JUnit's XML to this file")->type_name("FILE");
  command.add_flag("--github", options->github, "annotations for GitHub Actions; by itself where GITHUB_ACTIONS=true");
  command.callback([options, &chosen] { chosen = [options] { return check_file(*options); }; });
}

}  // namespace oomdiag
