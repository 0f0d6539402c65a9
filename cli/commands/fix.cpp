#include "cli/experiments/fix.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>

#include "cli/commands/commands.h"
#include "cli/commands/fix.h"
#include "cli/device/device.h"
#include "cli/device/gpus.h"
#include "cli/experiments/complete.h"
#include "cli/experiments/experiment.h"
#include "cli/experiments/fix_plan.h"
#include "cli/experiments/search_rows.h"
#include "cli/launch/models.h"
#include "cli/launch/programs.h"
#include "cli/launch/ranks.h"
#include "cli/launch/run_config.h"
#include "cli/process/files.h"
#include "cli/python/install.h"
#include "cli/reports/reports.h"
#include "cli/terminal/help.h"
#include "cli/terminal/terminal.h"
#include "profiler/counted.h"
#include "profiler/error.h"
#include "profiler/export/search_page.h"
#include "profiler/report/report.h"

namespace oomdiag {
namespace {

/// The virtual GPU that is called like a real one.
std::string virtual_gpu_of(const std::string& name, const Install& install) {
  for (const GpuEntry& gpu : read_catalogue(install.gpus)) {
    if (gpu.name == name) return gpu.id;
  }
  throw Error(ErrorKind::input, fmt::format("no virtual GPU is called {}", name), "name one: --device rtx4090");
}

/// A run that failed on a real GPU is tried on the virtual one of that name.
std::string virtual_name(const Report& report, const std::string& folder, const Install& install) {
  const ReportOfDevice* const device = main_device_of(report);
  if (device == nullptr) {
    throw Error(ErrorKind::input, fmt::format("the run in '{}' used no GPU", folder));
  }
  return virtual_gpu_of(device->device.name, install);
}

/// A real GPU can neither have more memory nor less than it has: it is measured as the virtual device of its name, and what
/// is said to fit is run on itself.
void set_device(Target& target, const DeviceChoice& choice, const Install& install) {
  require_gpu(choice);
  say_default(choice);
  const VirtualHost* const host = choice.virtual_host();
  target.proves_on_real = host == nullptr;
  if (host != nullptr) {
    target.device = *host;
  } else {
    target.device = {.gpus = choose_gpus(virtual_gpu_of(std::get<RealGpu>(choice.device).name, install), install)};
  }
}

/// How far the run came that `report` is about; nothing of a snapshot, which does not count steps.
std::optional<RecordedRun> recorded_run_of(const Report& report, const DeviceOptions& asked) {
  const ReportOfDevice* const device = main_device_of(report);
  if (report.snapshot || device == nullptr) return std::nullopt;
  return RecordedRun{.place = report.outcome == "ok" ? "" : place_of_failure(*device),
                     .step = step_to_reach(report),
                     .is_same = asked.device.empty() && asked.memory.empty()};
}

/// GPU and settings of a report or a snapshot, which have no program that could be run.
Target read_target_of_file(const FixOptions& options, const Install& install) {
  const Explained from = load_explained(options.folder);
  const Report& report = from.report;
  DeviceOptions device = options.device;
  if (device.device.empty()) {
    if (report.snapshot) {
      throw Error(ErrorKind::usage, "a snapshot does not name its GPU", "name it: --device rtx4090");
    }
    device.device = virtual_name(report, options.folder, install);
    if (device.memory.empty()) device.memory = std::to_string(report.devices[report.main_device].device.total_bytes);
  }
  Target target{.program = options.program, .recorded = recorded_run_of(report, options.device)};
  if (options.batch > 0) target.batch = options.batch;
  set_device(target, choose_device(device, install), install);
  const std::string settings = from.trace ? from.trace->process.allocator_settings : "";
  if (!settings.empty()) target.environment.emplace_back("PYTORCH_CUDA_ALLOC_CONF", settings);
  return target;
}

/// A reference loop that was recorded can be asked for another batch size and precision.
void recognise_model(Target& target, const std::optional<int64_t>& recorded_batch, const Install& install) {
  std::vector<std::string>& words = target.program;
  if (words.front() != install.samples.string()) return;
  const auto value_of = [&](const char* option) {
    const auto at = std::find(words.begin(), words.end(), option);
    return at == words.end() ? at : at + 1;
  };
  const auto name = value_of("--model");
  if (name == words.end()) return;
  const Model model = find_model(read_models(install.models), *name);
  target.takes_amp = model.takes_amp && value_of("--amp") == words.end();
  target.accumulates = model.accumulates && value_of("--accumulate") == words.end();
  if (model.default_batch == 0) return;
  target.batch = recorded_batch.value_or(model.default_batch);
  if (const auto batch = value_of("--batch"); batch != words.end()) {
    *batch = "{batch}";
  } else {
    words.insert(words.end(), {"--batch", "{batch}"});
  }
}

/// Command, GPU and settings of the recorded run; what the command line says goes before.
Target read_target(const FixOptions& options, const Install& install) {
  const RunConfig config = read_run_config(options.folder);
  const Report report = load_report(options.folder);
  DeviceOptions device = options.device;
  if (device.device.empty()) {
    device.device = config.device == "real" ? virtual_name(report, options.folder, install) : config.device;
    if (device.memory.empty() && config.memory_bytes > 0) device.memory = std::to_string(config.memory_bytes);
    device.clocked |= config.clocked;
  }
  Target target{.program = config.program, .rank = config.rank, .recorded = recorded_run_of(report, options.device)};
  set_device(target, choose_device(device, install), install);
  recognise_model(target, config.batch, install);
  if (options.batch > 0 && !target.batch) {
    throw Error(ErrorKind::usage, fmt::format("--batch: the program of '{}' is run as it was recorded", options.folder),
                "name it with {batch}: oomdiag fix --batch 8 -- python train.py --batch-size {batch}");
  }
  if (options.batch > 0) target.batch = options.batch;
  for (const auto& [name, value] : config.environment) target.environment.emplace_back(name, value);
  std::error_code error;
  std::filesystem::current_path(config.directory, error);
  if (error) {
    throw Error(ErrorKind::environment,
                fmt::format("cannot go to '{}', where it ran: {}", config.directory, error.message()));
  }
  return target;
}

/// The rank that is to fit, and its host.
void add_rank(Target& target, const Job& job, const DeviceChoice& choice, const FixOptions& options) {
  if (!options.ranks.is_job()) return;
  if (job.is_distinct || job.ranks.size() != 1) {
    throw Error(ErrorKind::usage, "fix helps one rank", "name it: --world-size 64 --rank 5");
  }
  target.device = host_of(job, choice);
  target.rank = SingleRank{.job = job, .number = job.ranks.front()};
}

Target make_target(const FixOptions& options, Install& install) {
  if (!options.folder.empty()) {
    Target target = options.program.empty() ? read_target(options, install) : read_target_of_file(options, install);
    target.program = resolve_program(std::move(target.program), install);
    return target;
  }
  const Job job = choose_job(options.ranks, options.device.count);
  const DeviceChoice choice = choose_device(device_of(job, options.device), install);
  Target target;
  if (!options.ranks.is_job()) set_device(target, choice, install);
  add_rank(target, job, choice, options);
  if (!options.model.model.empty()) {
    const Model model = find_model(read_models(install.models), options.model.model);
    target.program = program_of_model(options.model, model, install);
    target.takes_amp = model.takes_amp && options.model.amp.empty();
    target.accumulates = model.accumulates && options.model.accumulate.empty();
    if (model.default_batch > 0) {
      target.batch = options.batch > 0 ? options.batch : model.default_batch;
      target.program.insert(target.program.end(), {"--batch", "{batch}"});
    }
    return target;
  }
  target.program = resolve_program(options.program, install);
  if (options.batch > 0) target.batch = options.batch;
  return target;
}

void check(const FixOptions& options) {
  const int sources = int{!options.program.empty()} + int{!options.folder.empty()} + int{!options.model.model.empty()};
  if (!options.folder.empty()) check_exists(options.folder);
  const bool is_report = is_file(options.folder);
  if (is_report && options.program.empty()) {
    throw Error(ErrorKind::usage, fmt::format("'{}' does not say how its program was started", options.folder),
                fmt::format("name the program: oomdiag fix {} -- python train.py", options.folder));
  }
  if (!options.folder.empty() && options.ranks != RankOptions{}) {
    throw Error(ErrorKind::usage, fmt::format("'{}' was recorded as it is: a rank cannot be chosen", options.folder),
                "name the program: oomdiag fix --world-size 64 --rank 5 -- python train.py");
  }
  if (is_report ? sources == 2 && options.model.model.empty() : sources == 1) return;
  throw Error(ErrorKind::usage, "fix needs a program, a run folder or --model",
              "as in: oomdiag fix --device rtx4090 -- python train.py");
}

/// The answer to what was asked, in each of its forms.
struct FixAnswer {
  std::string text{}, json{};
  std::vector<SearchRow> rows{};
  SearchPicture picture{};
  bool found = false;
  int interrupted_by = 0;
  std::size_t runs = 0;
};

FixAnswer answer(const Fixed& fixed, const Target& target, const std::string& command) {
  return {.text = to_text(fixed, target, command),
          .json = to_json(fixed, target, command),
          .rows = rows_of(fixed),
          .found = fixed.helped(),
          .interrupted_by = fixed.interrupted_by,
          .runs = fixed.runs};
}

FixAnswer answer(const FoundPlans& plans, const Target& target, const std::string& command) {
  return {.text = to_text(plans, target, command),
          .json = to_json(plans, target, command),
          .rows = rows_of(plans, target),
          .picture = picture_of(plans, target),
          .found = plans.fastest.has_value(),
          .interrupted_by = plans.interrupted_by,
          .runs = plans.runs};
}

}  // namespace

int fix(FixOptions options) {
  options.fastest |= !options.budget.empty();
  if (options.program.empty() && options.model.model.empty()) options.folder = source_or_newest_run(options.folder);
  check(options);
  if (!options.target.empty()) options.device.memory = options.target;
  if (!options.budget.empty()) options.device.memory = options.budget;
  check_writable(options.output);
  check_writable(options.html, "--html");
  Install install = find_install();
  // A folder's program runs where it ran.
  const auto from_here = [](const std::string& path) {
    return path.empty() ? std::filesystem::path() : std::filesystem::absolute(path);
  };
  const std::filesystem::path folder = from_here(options.folder), html = from_here(options.html),
                              output = from_here(options.output);
  const Target target = make_target(options, install);
  Experiments experiments(install);
  if (options.never_forks) experiments.never_fork();
  if (options.model.model.empty()) experiments.keep_stdin();
  Steps steps(options.fastest ? "fit" : "fix");
  const auto on_done = [&](std::size_t over, std::size_t all) { steps.show(over, all); };
  const std::string command = fmt::format("{}", fmt::join(target.program, " "));
  const auto search = [&] {
    if (options.fastest) return answer(search_plans(target, experiments, on_done), target, command);
    const Fixed fixed = search_fix(target, experiments, on_done);
    FixAnswer of_fixed = answer(fixed, target, command);
    if (options.program.empty() && !folder.empty()) remember(fixed, of_fixed.json, folder);
    return of_fixed;
  };
  const FixAnswer found =
      steps.show_during(search, [] { say("interrupted before the program as it is was measured"); });
  if (found.interrupted_by != 0)
    say(fmt::format("interrupted after {}; what was measured:", counted(found.runs, "run")));
  if (!output.empty()) write_whole(found.json + "\n", output);
  write_out(options.json ? found.json + "\n" : found.text);
  const SearchPage page{
      .text = found.text, .program = command, .found = found.found, .rows = found.rows, .picture = found.picture};
  if (!html.empty()) write_whole(to_html(page), html);
  if (found.interrupted_by != 0) return 128 + found.interrupted_by;
  return found.found ? 0 : kOutOfMemory;
}

void add_fix(CLI::App& app, Command& chosen, const std::vector<std::string>& from_separator) {
  auto options = std::make_shared<FixOptions>();
  CLI::App& command = *app.add_subcommand("fix", "find fixes for an out of memory, each one proved by a run");
  set_help(
      command,
      {.example = "oomdiag fix --device rtx4090 -- python train.py",
       .about = "Applies each fix to the unchanged program, runs it on a virtual GPU and measures it.\n"
                "FOLDER is that of a run, by default of the newest here: its command, GPU and settings are "
                "taken. Of a report.json or a\n"
                "snapshot.pickle GPU and settings are, and the program is named.\n"
                "Exit code: 0 a fix makes it fit, 3 none does, 1 failed, as where the program does not run out again.",
       .usage = "oomdiag fix [OPTIONS] (-- PROGRAM [...] | [FOLDER] | FILE -- PROGRAM [...] | --model NAME)"});
  command.add_option("folder", options->folder, "a run folder oomdiag-<pid>, or a report or snapshot")
      ->type_name("FOLDER");
  add_model_options(command, options->model);
  command.add_option("--batch", options->batch, "batch size: of the model, or what {batch} in PROGRAM stands for")
      ->type_name("N")
      ->check(range(1, 1 << 30));
  add_device_options(command, options->device);
  add_rank_options(command, options->ranks);
  command.add_option("--target", options->target, "make it fit into a GPU of this size, as in 8GiB")->type_name("SIZE");
  command
      .add_option("--budget", options->budget,
                  "find the fastest plan that fits into so much GPU memory: which blocks are checkpointed, precision, "
                  "optimizer, loss, micro-batches; its best plans are run")
      ->type_name("SIZE");
  command.add_flag("--json", options->json, "print what was found as JSON");
  add_no_fork(command, options->never_forks);
  add_json_file(command, options->output, "what was found");
  add_page_file(command, options->html, "what was found");
  command.callback([options, &chosen, &from_separator] {
    if (!from_separator.empty()) options->program.assign(from_separator.begin() + 1, from_separator.end());
    chosen = [options] { return fix(*options); };
  });
}

}  // namespace oomdiag
