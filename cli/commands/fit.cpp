#include "cli/experiments/fit.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "cli/commands/commands.h"
#include "cli/commands/fix.h"
#include "cli/device/device.h"
#include "cli/device/gpus.h"
#include "cli/experiments/experiment.h"
#include "cli/experiments/fit_gpus.h"
#include "cli/experiments/fit_lengths.h"
#include "cli/experiments/fit_plan.h"
#include "cli/experiments/fit_text.h"
#include "cli/experiments/fit_values.h"
#include "cli/experiments/search_rows.h"
#include "cli/launch/models.h"
#include "cli/launch/programs.h"
#include "cli/launch/ranks.h"
#include "cli/python/install.h"
#include "cli/reports/reports.h"
#include "cli/terminal/help.h"
#include "cli/terminal/terminal.h"
#include "profiler/error.h"
#include "profiler/export/search_page.h"
#include "profiler/whole_number.h"

namespace oomdiag {
namespace {

constexpr int64_t kMaxCombinations = 256;

constexpr const char* kAllSteps = "all";
constexpr const char* kDevice = "h200";

struct FitOptions {
  std::vector<std::string> program;
  ModelOptions model;
  std::string device;  ///< empty: kDevice, unless the topology names one
  std::string devices;
  std::string memory;
  int count = 0;
  std::vector<std::string> vary;
  std::string steps;  ///< a number, kAllSteps, or empty
  int most_runs = FitRequest{}.most_runs;
  bool smallest_gpu = false;
  bool fastest = false;
  bool json = false;
  bool never_forks = false;
  RankOptions host;  ///< of a job
  bool prints_jobs = false;
  std::string collect;
  std::string html;
  std::vector<std::string> at;  ///< points to be computed
  bool only_at = false;         ///< … and nothing else
  std::string lengths;          ///< file
};

/// What was found, as asked for.
struct Answer {
  std::string text, json;
  std::vector<SearchRow> rows;
  bool found = false;
  SearchPicture picture{};
};

int print_answer(const Answer& answer, const FitOptions& options, const std::vector<std::string>& program) {
  fmt::print("{}", options.json ? answer.json : answer.text);
  if (!options.html.empty()) {
    const SearchPage page{.text = answer.text,
                          .program = fmt::format("{}", fmt::join(program, " ")),
                          .found = answer.found,
                          .rows = answer.rows,
                          .picture = answer.picture};
    write_whole(to_html(page), options.html);
  }
  return answer.found ? 0 : kOutOfMemory;
}

void say_interrupted(const std::vector<FitRun>& runs, const FitOptions& options) {
  write_out(options.json ? interrupted_json(runs) : interrupted_text(runs));
}

void add_variable(std::vector<Variable>& variables, Variable variable) {
  if (std::ranges::find(variables, variable.name, &Variable::name) != variables.end()) {
    throw Error(ErrorKind::usage, fmt::format("--vary names {} twice", variable.name),
                fmt::format("list its values: --vary {}=128,256,512", variable.name));
  }
  variables.push_back(std::move(variable));
}

void check_variables(const std::vector<Variable>& variables, const std::vector<std::string>& program) {
  for (const Variable& variable : variables) {
    const auto uses = [&](const std::string& word) { return word.find("{" + variable.name + "}") != word.npos; };
    if (variable.name == kWorld || std::any_of(program.begin(), program.end(), uses)) continue;
    throw Error(ErrorKind::usage, fmt::format("the program has no {{{}}} to vary", variable.name),
                fmt::format("as in: -- python train.py --batch-size {{{}}}", variable.name));
  }
  if (is_plan(variables)) return;  // of which all are tried
  int64_t combinations = 1;
  for (std::size_t i = 1; i < variables.size(); ++i) {
    combinations = variables[i].count() > kMaxCombinations ? kMaxCombinations + 1 : combinations * variables[i].count();
    if (combinations <= kMaxCombinations) continue;
    throw Error(ErrorKind::usage,
                fmt::format("{} has too many values: of several variables only the first is searched, and all "
                            "values of the others are tried",
                            variables[i].name),
                "as in: --vary batch=1..65536 --vary seq=128,256,512");
  }
}

void check_lengths(const FitOptions& options, const std::vector<Variable>& variables) {
  const auto uses = [](const std::string& word) { return word.find("{" + std::string(kLength) + "}") != word.npos; };
  const bool takes_length = std::any_of(options.program.begin(), options.program.end(), uses);
  if (variables.size() == 1 && takes_length != (options.lengths == kLoader)) return;
  if (options.lengths == kLoader) {
    throw Error(ErrorKind::usage, "--lengths loader goes with one --vary, and a program without {length}",
                "as in: --vary batch=1..512 --lengths loader -- python train.py --batch-size {batch}");
  }
  throw Error(
      ErrorKind::usage, "--lengths goes with one --vary and a program that takes {length}",
      "as in: --vary batch=1..512 --lengths lengths.txt -- python train.py --batch-size {batch} --length {length}");
}

/// As after --device; empty where the topology names the GPU.
std::string device_name(const FitOptions& options, const TopologyChoice& topology) {
  return options.device.empty() && topology.gpu.empty() ? kDevice : options.device;
}

uint32_t steps_of(const FitOptions& options) {
  constexpr int64_t kMax = 1 << 20;
  if (options.steps.empty() || options.steps == kAllSteps) return 0;
  const int64_t steps = parse_whole_number(options.steps).value_or(0);
  if (steps >= 1 && steps <= kMax) return static_cast<uint32_t>(steps);
  throw Error(ErrorKind::usage, fmt::format("--steps {} is no number of steps from 1 to {}", options.steps, kMax),
              "as in --steps 45, or --steps all for whole runs");
}

FitRequest make_request(const FitOptions& options, Install& install, bool by_batch) {
  const TopologyChoice topology = options.host.hosts();
  const DeviceOptions device{
      .device = device_name(options, topology), .memory = options.memory, .count = options.count};
  FitRequest request{.device = choose_device(device_of({.topology = topology}, device), install),
                     .steps = steps_of(options),
                     .to_end = options.steps == kAllSteps,
                     .count = std::max(1, options.count),
                     .most_runs = options.most_runs};
  require_gpu(request.device);
  if (options.model.model.empty()) {
    request.program = resolve_program(options.program, install);
    return request;
  }
  const Model model = find_model(read_models(install.models), options.model.model);
  request.program = program_of_model(options.model, model, install);
  if (!by_batch) return request;
  if (model.default_batch == 0) {
    throw Error(ErrorKind::usage, fmt::format("{} has no batches", model.name),
                "find its smallest GPU: --smallest-card");
  }
  request.program.insert(request.program.end(), {"--batch", "{batch}"});
  return request;
}

int fit_gpu(const FitOptions& options, const FitRequest& request, const Install& install, Experiments& experiments) {
  Steps steps("fit");
  Fitter fitter(request, experiments, [&](std::size_t over) { steps.show(over); });
  SmallestGpu gpu = steps.show_during([&] { return find_smallest_gpu(fitter, {}); },
                                      [&] { say_interrupted(fitter.runs(), options); });
  if (gpu.bytes > 0 && !gpu.takes_share)
    gpu.card = find_card(read_catalogue(install.gpus), request.device.virtual_host()->gpus.front(), gpu.bytes);
  const Answer answer{.text = gpu_text(gpu, fitter.runs()),
                      .json = gpu_json(gpu, fitter.runs()),
                      .rows = rows_of(std::vector<FitOfGpu>{{.gpu = {}, .largest = {}, .runs = fitter.runs()}}),
                      .found = gpu.bytes > 0};
  return print_answer(answer, options, request.program);
}

GpuEntry real_gpu() {
  GpuEntry gpu;
  gpu.id = "real";
  return gpu;
}

/// The GPUs of --devices, or the one of --device. The real one has no entry but its name.
std::vector<GpuEntry> gpus_of(const FitOptions& options, const FitRequest& request, const Install& install) {
  if (options.devices == "all") return read_catalogue(install.gpus);
  if (!options.devices.empty()) return choose_gpus(options.devices, install);
  const VirtualHost* const host = request.device.virtual_host();
  return {host == nullptr ? real_gpu() : host->gpus.front()};
}

int fit_gpus(const FitOptions& options, const FitRequest& request, const Install& install, Experiments& experiments) {
  Steps steps("fit");
  std::vector<FitRun> runs;
  const auto on_done = [&](std::size_t over) { steps.show(over); };
  const GpuTable table = steps.show_during(
      [&] { return find_gpus(request, gpus_of(options, request, install), experiments, on_done, runs); },
      [&] { say_interrupted(runs, options); });
  const Answer answer{.text = gpus_text(table, runs),
                      .json = gpus_json(table, runs),
                      .rows = rows_of(std::vector<FitOfGpu>{{.gpu = {}, .largest = {}, .runs = runs}}),
                      .found = table.smallest() != nullptr};
  return print_answer(answer, options, request.program);
}

int say_plans(const std::vector<Plan>& plans, const FitOptions& options, const std::vector<std::string>& program = {},
              const std::string& searched = "") {
  const Answer answer{.text = plans_text(plans, searched),
                      .json = plans_json(plans, searched),
                      .rows = rows_of(plans),
                      .found = best_plan(plans) != nullptr};
  return print_answer(answer, options, program);
}

/// What the command of each of a job's plans says of its host.
std::vector<std::string> options_of_job(const FitOptions& options) {
  std::vector<std::string> words;
  const auto add = [&](const char* option, const std::string& value) {
    if (!value.empty()) words.insert(words.end(), {option, value});
  };
  add("--device", device_name(options, options.host.hosts()));
  add("--memory", options.memory);
  add("--local-world-size",
      options.host.local_world_size > 0 ? std::to_string(options.host.local_world_size) : std::string());
  add("--topology", options.host.topology);
  return words;
}

int fit_plan(const FitOptions& options, const std::vector<Variable>& variables, const FitRequest& request,
             const Install& install) {
  const Planning planning = list_plans(variables);
  if (options.prints_jobs) {
    if (planning.searched) {
      throw Error(ErrorKind::usage, fmt::format("a search of {} is no list of jobs", planning.searched->name),
                  fmt::format("list its values, as in: --vary {}=1,2,4,8", planning.searched->name));
    }
    fmt::print("{}", print_jobs(planning.plans, request, options_of_job(options), "plans"));
    return 0;
  }
  Steps steps("fit");
  std::vector<Plan> found;
  const std::string searched = planning.searched ? planning.searched->name : "";
  const auto take = [&](Plan plan) {
    found.push_back(std::move(plan));
    steps.show(found.size(), planning.plans.size());
  };
  const auto say_found = [&] { return say_plans(found, options, request.program, searched); };
  const auto search = [&] {
    run_plans(planning, request, options.host, install, take);
    return true;
  };
  steps.show_during(search, [&] {
    complain(fmt::format("oomdiag: interrupted after {} of {} plans\n", found.size(), planning.plans.size()));
    if (!found.empty()) say_found();
  });
  return say_found();
}

ValueQuestion ask(const FitOptions& options, const std::vector<Variable>& variables, const FitRequest& request,
                  Experiments& experiments) {
  ValueQuestion question{
      .variables = variables, .only_points = options.only_at, .wants_surface = !options.html.empty()};
  if (!options.lengths.empty()) {
    const Values least{{variables.front().name, variables.front().value(0)}};
    question.lengths =
        options.lengths == kLoader ? look_at_loaders(request, experiments, least) : read_lengths(options.lengths);
  }
  for (const std::string& text : options.at) question.points.push_back(parse_values(text, question.learned()));
  return question;
}

int fit_value(const FitOptions& options, const std::vector<Variable>& variables, FitRequest request,
              const Install& install, Experiments& experiments) {
  if (is_plan(variables)) return fit_plan(options, variables, request, install);
  const ValueQuestion question = ask(options, variables, request, experiments);
  if (options.lengths == kLoader)
    request.fixes_of = [&](const Values& values) { return question.lengths->batches_of(values.at(kLength)); };
  const std::vector<GpuEntry> gpus = gpus_of(options, request, install);
  Steps steps("fit");
  ValueSearch search(request, experiments, question, [&](std::size_t over) { steps.show(over); });
  const auto search_all = [&] {
    std::vector<FitOfGpu> of_gpus;
    for (const GpuEntry& gpu : gpus) of_gpus.push_back(search.search(gpu));
    return of_gpus;
  };
  const std::vector<FitOfGpu> found = steps.show_during(search_all, [&] { say_interrupted(search.runs(), options); });
  const bool any = std::any_of(found.begin(), found.end(), [&](const FitOfGpu& one) {
    return options.only_at ? !one.computed.empty() : one.best() != nullptr;
  });
  std::string text = values_text(variables.front(), found);
  if (question.lengths) text += lengths_text(*question.lengths, found.front().largest.front(), found.front().budget);
  const Answer answer{.text = text,
                      .json = values_json(variables.front().name, found),
                      .rows = rows_of(found),
                      .found = any,
                      .picture = picture_of(found.front())};
  return print_answer(answer, options, request.program);
}

int fit(FitOptions options) {
  check_writable(options.html, "--html");
  if (!options.collect.empty()) return say_plans(collect_plans(options.collect), options);
  const bool has_program = !options.program.empty(), has_model = !options.model.model.empty();
  if (has_model && options.vary.empty() && !options.smallest_gpu && !options.fastest) options.vary = {"batch=1..65536"};
  if (has_program == has_model || int{options.smallest_gpu} + int{options.fastest} + int{!options.vary.empty()} != 1) {
    throw Error(ErrorKind::usage, "fit needs --smallest-card, --fastest or --vary, and a program or --model",
                "as in: oomdiag fit --smallest-card -- python train.py");
  }
  const bool is_real = names_real_gpu(options.device);
  if (is_real && (options.smallest_gpu || !options.devices.empty() || !options.memory.empty() || options.count > 0)) {
    throw Error(ErrorKind::usage, "another size of GPU than the real one needs a virtual device",
                "name one of oomdiag devices, as in: --device rtx4090");
  }
  if (options.fastest) {
    return fix({.program = options.program,
                .model = options.model,
                .device = {.device = options.device.empty() ? kDevice : options.device, .memory = options.memory},
                .html = options.html,
                .fastest = true,
                .json = options.json,
                .never_forks = options.never_forks});
  }
  std::vector<Variable> variables;
  for (const std::string& text : options.vary) add_variable(variables, parse_variable(text));
  if (options.prints_jobs && !is_plan(variables)) {
    throw Error(ErrorKind::usage, "--print-jobs needs a job: a world to vary", "as in: --vary world=8,16,32");
  }
  if (options.count > 0 && is_plan(variables)) {
    throw Error(ErrorKind::usage, "--count goes with no world to vary: its ranks say how many GPUs a host has",
                "as in: --vary world=8,16 --local-world-size 4");
  }
  if (!options.lengths.empty()) check_lengths(options, variables);
  if (options.only_at && (options.at.empty() || !options.lengths.empty())) {
    throw Error(ErrorKind::usage, "--only-at needs values to compute, and no --lengths",
                "as in: --only-at --at batch=48");
  }
  if (has_program) check_variables(variables, options.program);  // before anything is run
  Install install = find_install();
  const FitRequest request = make_request(options, install, !options.smallest_gpu);
  if (has_model) check_variables(variables, request.program);
  Experiments experiments(install);
  if (options.never_forks) experiments.never_fork();
  if (has_program) experiments.keep_stdin();
  if (!options.smallest_gpu) return fit_value(options, variables, request, install, experiments);
  return options.devices.empty() ? fit_gpu(options, request, install, experiments)
                                 : fit_gpus(options, request, install, experiments);
}

/// What is searched for, or computed without a run.
void add_value_options(CLI::App& command, FitOptions& options) {
  command
      .add_option(
          "--vary", options.vary,
          "search for the largest value of {NAME}: 1..65536, 8..512:8, 1..1024:pow2, or 128,256,512; of several "
          "the first is searched, for all values of the others. world=8..64 makes a job of so many ranks: the "
          "smallest that fits, or the largest value of a range that goes before")
      ->type_name("NAME=VALUES")
      ->allow_extra_args(false);
  command
      .add_option("--at", options.at,
                  "also compute the peak of these values, without a run of them: batch=48, batch=48,seq=1024")
      ->type_name("NAME=VALUE,...")
      ->allow_extra_args(false);
  command.add_flag("--only-at", options.only_at, "search for no border: only compute the values of --at");
  command
      .add_option("--lengths", options.lengths,
                  "the lengths of a data set's samples, one a line: finds the largest {batch} that fits in any order, "
                  "and the largest budget of padded tokens; {length} in the program is the longest of a batch. "
                  "loader: those of the program's own DataLoader, and its batches are made as long as is asked for")
      ->type_name("FILE|loader");
}

}  // namespace

void add_fit(CLI::App& app, Command& chosen, const std::vector<std::string>& from_separator) {
  auto options = std::make_shared<FitOptions>();
  CLI::App& command = *app.add_subcommand("fit", "find the smallest GPU or the largest batch that fits, by running");
  set_help(command,
           {.example = "oomdiag fit --smallest-card -- python train.py\n"
                       "         oomdiag fit --device rtx4090 --vary batch=1..65536 -- python train.py "
                       "--batch-size {batch}",
            .about = "Finds by re-runs on a virtual device the smallest GPU on which a program passes, to\n"
                     "2 MiB, or the largest value with which it does. Exit code: 0 found, 3 nothing fits, 1 failed.",
            .usage = "oomdiag fit (--smallest-card | --fastest | --vary NAME=VALUES) [OPTIONS] (-- PROGRAM [...] | "
                     "--model NAME)"});
  add_model_options(command, options->model);
  command.add_flag("--smallest-card", options->smallest_gpu, "search for the GPU");
  command.add_flag("--fastest", options->fastest,
                   "search for the fastest plan that fits on the device: blocks to checkpoint, precision, optimizer, "
                   "loss, micro-batches; as fix --budget");
  add_value_options(command, *options);
  command.add_option("--device", options->device, "the kind of GPU: a name of oomdiag devices, ./device.json, or real")
      ->type_name("NAME")
      ->default_str(kDevice);
  command
      .add_option(
          "--devices", options->devices,
          "a list of them, or all: a table of what fits on each; with --smallest-card of those that it fits on,\n"
          "computed from one run and proved on the smallest")
      ->type_name("NAMES");
  command
      .add_option("--count", options->count, "that many of the virtual device, as for torchrun: the fullest one counts")
      ->type_name("N")
      ->check(range(1, kMaxGpus));
  command.add_option("--memory", options->memory, "memory of the GPU in place of its own, as in 8GiB")
      ->type_name("SIZE");
  command
      .add_option(
          "--steps", options->steps,
          "end each run after so many steps; all: at the program's own end. Default: when its peak is steady, and "
          "what then fits is run on to the program's end, for a minute at most")
      ->type_name("N|all");
  command
      .add_option("--runs", options->most_runs,
                  "of one search: those that the border does not need try values above it, which may pass again")
      ->type_name("N")
      ->check(range(2, 1 << 12))
      ->capture_default_str();
  add_host_options(command, options->host);
  command.add_flag("--print-jobs", options->prints_jobs,
                   "of a job's plans: print their runs, one command a line, and run none");
  command
      .add_option("--collect", options->collect,
                  "of a job's plans: the table of the reports that such commands wrote into this folder")
      ->type_name("DIR");
  command.add_flag("--json", options->json, "print what was found, and every run, as JSON");
  add_no_fork(command, options->never_forks);
  add_page_file(command, options->html, "what was found, and every run,");
  command.callback([options, &chosen, &from_separator] {
    if (!from_separator.empty()) options->program.assign(from_separator.begin() + 1, from_separator.end());
    chosen = [options] { return fit(*options); };
  });
}

}  // namespace oomdiag
