#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>

#include "cli/commands.h"
#include "cli/diagnosis.h"
#include "cli/help.h"
#include "cli/python.h"
#include "cli/run_folder.h"
#include "cli/search.h"
#include "cli/sizes.h"
#include "cli/terminal.h"
#include "profiler/error.h"
#include "profiler/replay/rounding.h"

// Searches by running: each trial is a whole run of the program on a virtual device. The driver gives memory in pages of
// 2 MiB, so that is how exact the smallest card can be.

namespace oomdiag {
namespace {

constexpr int64_t kPageBytes = kRoundLargeBytes;
constexpr int64_t kLeastCard = 256 * kMiB, kLargestCard = int64_t{16} << 40;
constexpr int kOutOfMemory = 3;

struct Options {
  std::vector<std::string> program;
  std::string device = "h200";
  std::string memory;
  std::string vary;
  bool smallest_card = false;
  bool json = false;
};

/// What --vary says: "batch=1..65536".
struct Variable {
  std::string name;
  int64_t least = 0, most = 0;
};

Variable parse_variable(const std::string& text) {
  Variable variable;
  const size_t equals = text.find('='), dots = text.find("..");
  const auto read = [&](size_t begin, size_t end, int64_t& to) {
    const auto [rest, error] = std::from_chars(text.data() + begin, text.data() + end, to);
    return error == std::errc{} && rest == text.data() + end;
  };
  const bool shaped = equals != text.npos && equals > 0 && dots != text.npos && dots > equals;
  if (shaped && read(equals + 1, dots, variable.least) && read(dots + 2, text.size(), variable.most)) {
    variable.name = text.substr(0, equals);
    if (variable.least > 0 && variable.least <= variable.most && variable.most <= (int64_t{1} << 40)) return variable;
  }
  throw Error(ErrorKind::usage, fmt::format("--vary '{}' is no range of positive numbers", text),
              "as in: --vary batch=1..65536");
}

/// One run and what came of it.
struct Run {
  int64_t memory_bytes = 0, value = 0;
  Ending ending;
  std::string outcome{};
  std::string failure{};  ///< "backward, step 2", where it ran out of memory
  int64_t allocated_bytes = 0, reserved_bytes = 0, outside_bytes = 0;
};

std::string replace_all(std::string text, const std::string& what, const std::string& by) {
  for (size_t at = 0; (at = text.find(what, at)) != text.npos; at += by.size()) text.replace(at, what.size(), by);
  return text;
}

/// Runs the program again and again.
class Fitter {
 public:
  Fitter(const Options& options, const Install& install)
      : options_(options), install_(install), base_(std::filesystem::temp_directory_path() / "oomdiag-fit") {}

  /// Runs with a card of `memory_bytes` (0: the card's own) and, where something varies, with `value` for it. Throws
  /// Error(environment) if the program fails for another reason than memory.
  const Run& run(int64_t memory_bytes, const std::string& name, int64_t value) {
    const std::string what =
        name.empty() ? fmt::format("a card of {} GiB", to_gib(memory_bytes)) : fmt::format("{} = {}", name, value);
    const Progress progress(fmt::format("run {}: {} ...", runs_.size() + 1, what));
    const std::string memory = memory_bytes == 0 ? options_.memory : std::to_string(memory_bytes);
    const DeviceChoice device = choose_device({.device = options_.device, .memory = memory}, install_);
    const Diagnosis diagnosis = diagnose(
        {.program = with(name, value), .device = device, .base = choose_base(base_), .keeps_output = true}, install_);
    Run& run = runs_.emplace_back(Run{.memory_bytes = memory_bytes, .value = value, .ending = diagnosis.ending});
    if (diagnosis.report) read(*diagnosis.report, run);
    if (run.outcome != "ok" && run.outcome != "out_of_memory") give_up(diagnosis);
    std::error_code ignored;
    std::filesystem::remove_all(diagnosis.folder, ignored);
    return run;
  }
  const std::vector<Run>& runs() const { return runs_; }

 private:
  std::vector<std::string> with(const std::string& name, int64_t value) const {
    std::vector<std::string> program = options_.program;
    if (name.empty()) return program;
    for (std::string& word : program) word = replace_all(word, "{" + name + "}", std::to_string(value));
    return program;
  }

  static void read(const Report& report, Run& run) {
    run.outcome = report.outcome;
    if (report.main_device >= report.devices.size()) return;
    const ReportOfDevice& device = report.devices[report.main_device];
    run.allocated_bytes = device.peak.allocated_bytes;
    run.reserved_bytes = device.peak.reserved_bytes;
    run.outside_bytes = device.card.outside_pytorch_bytes;
    if (device.failure) run.failure = fmt::format("{}, step {}", device.failure->phase, device.failure->step);
  }

  [[noreturn]] static void give_up(const Diagnosis& diagnosis) {
    throw Error(ErrorKind::environment,
                fmt::format("the program ended with exit code {}, and not for want of memory; {}",
                            diagnosis.ending.code(), diagnosis.why_no_report),
                fmt::format("its output is in '{}'", (diagnosis.folder / "output.txt").string()));
  }

  const Options& options_;
  const Install& install_;
  std::filesystem::path base_;
  std::vector<Run> runs_;
};

bool passed(const Run& run) { return run.outcome == "ok"; }

nlohmann::ordered_json to_json(const std::vector<Run>& runs) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Run& run : runs) {
    list.push_back({{"memory_bytes", run.memory_bytes},
                    {"value", run.value},
                    {"outcome", run.outcome},
                    {"peak_allocated_bytes", run.allocated_bytes},
                    {"peak_reserved_bytes", run.reserved_bytes}});
  }
  return list;
}

/// A run that passes: on the card itself, or, if that is too small, on one twice as large, and so on.
const Run& run_on_large_card(Fitter& fitter) {
  const Run* run = &fitter.run(0, "", 0);
  for (int64_t bytes = 256 * kGiB; !passed(*run) && bytes <= kLargestCard; bytes *= 2) run = &fitter.run(bytes, "", 0);
  return *run;
}

// Where the run passes with room to spare, it needs at least what it allocated and at most what it reserved, beside what
// others hold. In between the allocator gives cached segments back and tries again: only runs can tell.
int fit_card(const Options& options, const Install& install) {
  Fitter fitter(options, install);
  const Run large = run_on_large_card(fitter);
  if (!passed(large)) {
    fmt::print("oomdiag: it runs out of memory in {} on any card\n", large.failure);
    return kOutOfMemory;
  }
  const int64_t fails = std::max(kLeastCard, large.outside_bytes + large.allocated_bytes) - kPageBytes;
  int64_t passes = std::max(kLeastCard, large.outside_bytes + large.reserved_bytes + kPageBytes);
  const Trial trial = [&](int64_t bytes) { return passed(fitter.run(bytes, "", 0)); };
  while (!trial(passes)) passes += passes / 8;  // libraries choose other algorithms where little is free
  const int64_t found = find_smallest(fails, passes, kPageBytes, trial);
  if (options.json) {
    const nlohmann::ordered_json json = {
        {"schema", "oomdiag-fit/1"}, {"smallest_card_bytes", found}, {"runs", to_json(fitter.runs())}};
    fmt::print("{}\n", json.dump(2));
    return 0;
  }
  fmt::print("oomdiag: needs {} GiB: the smallest card on which it passes has {} bytes\n\n", to_gib(found), found);
  for (const Run& run : fitter.runs()) {
    if (run.memory_bytes != found - kPageBytes || passed(run)) continue;
    fmt::print("  with 2 MiB less it runs out of memory in {}\n", run.failure);
  }
  fmt::print("  {:.2f} GiB of them are outside PyTorch (on a virtual card: an estimate); {} runs, all measured\n",
             static_cast<double>(large.outside_bytes) / static_cast<double>(kGiB), fitter.runs().size());
  return 0;
}

int fit_value(const Options& options, const Install& install) {
  const Variable variable = parse_variable(options.vary);
  const auto uses = [&](const std::string& word) { return word.find("{" + variable.name + "}") != word.npos; };
  if (std::none_of(options.program.begin(), options.program.end(), uses)) {
    throw Error(ErrorKind::usage, fmt::format("the program has no {{{}}} to vary", variable.name),
                fmt::format("as in: -- python train.py --batch-size {{{}}}", variable.name));
  }
  Fitter fitter(options, install);
  const auto found = find_largest(variable.least, variable.most,
                                  [&](int64_t value) { return passed(fitter.run(0, variable.name, value)); });
  if (options.json) {
    nlohmann::ordered_json json = {{"schema", "oomdiag-fit/1"}, {"variable", variable.name}};
    json["largest"] = found ? nlohmann::ordered_json(*found) : nlohmann::ordered_json(nullptr);
    json["runs"] = to_json(fitter.runs());
    fmt::print("{}\n", json.dump(2));
    return found ? 0 : kOutOfMemory;
  }
  if (!found) {
    fmt::print("oomdiag: {} = {} already runs out of memory in {}\n", variable.name, variable.least,
               fitter.runs().back().failure);
    return kOutOfMemory;
  }
  fmt::print("oomdiag: fits up to {} = {}\n\n", variable.name, *found);
  for (const Run& run : fitter.runs()) {
    if (run.value == *found) fmt::print("  its peak is {} GiB allocated\n", to_gib(run.allocated_bytes));
    if (run.value == *found + 1) fmt::print("  {} runs out of memory in {}\n", run.value, run.failure);
  }
  fmt::print("  {} runs, all measured\n", fitter.runs().size());
  return 0;
}

/// `train …` stands for the samples program, and python for one that has the right torch.
std::vector<std::string> resolve(std::vector<std::string> program, const Install& install) {
  if (program.front() == "train") program.front() = install.samples.string();
  if (!is_python(program.front())) return program;
  const PythonChoice python = choose_python(program.front(), install);
  say(python.note);
  program.front() = python.executable;
  return program;
}

int fit(Options options) {
  if (options.program.empty() || options.smallest_card == !options.vary.empty()) {
    throw Error(ErrorKind::usage, "fit needs --smallest-card or --vary, and a program",
                "as in: oomdiag fit --smallest-card -- python train.py");
  }
  const Install install = find_install();
  if (options.device == "real" || options.device == "cuda") {
    throw Error(ErrorKind::usage, "fit tries cards that are not there: it needs a virtual device",
                "name one of oomdiag devices, as in: --device rtx4090");
  }
  options.program = resolve(options.program, install);
  return options.smallest_card ? fit_card(options, install) : fit_value(options, install);
}

}  // namespace

void add_fit(CLI::App& app, Command& chosen, const std::vector<std::string>& from_separator) {
  auto options = std::make_shared<Options>();
  CLI::App& command = *app.add_subcommand("fit", "find the smallest card or the largest batch that fits, by running");
  set_help(command, {.example = "oomdiag fit --smallest-card -- python train.py\n"
                                "         oomdiag fit --device rtx4090 --vary batch=1..65536 -- python train.py "
                                "--batch-size {batch}",
                     .about = "Finds by re-runs on a virtual device the smallest card on which a program passes, to\n"
                              "2 MiB, or the largest value with which it does. A program 'train' is that of\n"
                              "oomdiag train. Exit code: 0 found, 3 nothing fits, 1 failed.",
                     .usage = "oomdiag fit (--smallest-card | --vary NAME=LEAST..MOST) [OPTIONS] -- PROGRAM [...]"});
  command.prefix_command();
  command.add_flag("--smallest-card", options->smallest_card, "search for the card");
  command.add_option("--vary", options->vary, "search for the largest value of {NAME}")->type_name("NAME=LEAST..MOST");
  command.add_option("--device", options->device, "the kind of card: a name of oomdiag devices, or ./card.json")
      ->type_name("NAME")
      ->capture_default_str();
  command.add_option("--memory", options->memory, "memory of the card in place of its own, as in 8GiB")
      ->type_name("SIZE");
  command.add_flag("--json", options->json, "print what was found, and every run, as JSON");
  command.callback([options, &chosen, &from_separator] {
    if (!from_separator.empty()) options->program.assign(from_separator.begin() + 1, from_separator.end());
    chosen = [options] { return fit(*options); };
  });
}

}  // namespace oomdiag
