#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <memory>
#include <optional>

#include "cli/commands/commands.h"
#include "cli/commands/export.h"
#include "cli/device/device.h"
#include "cli/experiments/case_study.h"
#include "cli/experiments/complete.h"
#include "cli/launch/diagnosis.h"
#include "cli/launch/models.h"
#include "cli/launch/programs.h"
#include "cli/process/environment.h"
#include "cli/python/install.h"
#include "cli/reports/reports.h"
#include "cli/reports/run_folder.h"
#include "cli/terminal/help.h"
#include "cli/terminal/terminal.h"
#include "profiler/error.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/report/text/text.h"
#include "profiler/report/words/place_text.h"
#include "profiler/trace/trace.h"
#include "samples/cases/notes.h"

namespace oomdiag {
namespace {

struct TrainOptions {
  ModelOptions model{.model = "deepcnn"};
  int64_t batch = 0;  ///< 0 = the model's own
  DeviceOptions device;
  std::string folder;
  std::string output;
  std::string html;
  bool json = false;
  bool all = false;
};

/// The samples program for one variant.
std::vector<std::string> compose_program(const TrainOptions& options, const Model& model, const Install& install,
                                         const std::string& variant, const std::string& device) {
  ModelOptions of_variant = options.model;
  of_variant.variant = variant;
  std::vector<std::string> program = program_of_model(of_variant, model, install);
  program.insert(program.end(), {"--device", device});
  if (options.batch != 0) program.insert(program.end(), {"--batch", std::to_string(options.batch)});
  return program;
}

/// Throws Error(usage) for what the model has no use for: to pass over it in silence would mislead.
void check_options(const TrainOptions& options, const Model& model) {
  const ModelOptions& asked = options.model;
  check_variant(model, asked.variant);
  const auto reject = [&](const char* option, const char* why) {
    throw Error(ErrorKind::usage, fmt::format("{} takes no {}: {}", model.name, option, why),
                fmt::format("oomdiag train --model {}", model.name));
  };
  if (options.batch != 0 && model.default_batch == 0) reject("--batch", "it has no batches");
  if (!asked.steps.empty() && model.default_steps == 0) reject("--steps", "it runs one step");
  if (!asked.optimizer.empty() && model.default_optimizer.empty()) reject("--optimizer", "it has none to choose");
  if (!asked.amp.empty() && !model.takes_amp) reject("--amp", "it has its own precision, or no layers");
  if (!asked.accumulate.empty() && asked.accumulate != "1" && !model.accumulates)
    reject("--accumulate", "its batch is not taken in parts");
}

int give_up(const Diagnosis& diagnosis) {
  const std::string last = last_lines(diagnosis.folder / "output.txt");
  remove_empty_run(diagnosis.folder);
  if (diagnosis.ending.signal == SIGINT) return kInterrupted;
  const std::string& killed = diagnosis.why_killed;
  throw Error(
      ErrorKind::environment,
      fmt::format("{}; {}\n{}",
                  killed.empty() ? fmt::format("the training program ended with exit code {}", diagnosis.ending.code())
                                 : killed,
                  diagnosis.why_no_report, last));
}

/// Why recording stopped before the program ended, or empty: then what was seen says nothing about the whole.
std::string why_recording_stopped(const Diagnosis& diagnosis) {
  for (const std::filesystem::path& trace : find_traces(diagnosis.folder)) {
    if (std::string why = read_process(trace).recorder_failure; !why.empty()) return why;
  }
  return {};
}

void check_recording(const Diagnosis& diagnosis) {
  const std::string why = why_recording_stopped(diagnosis);
  if (why.empty()) return;
  throw Error(ErrorKind::environment,
              fmt::format("recording stopped before the training ended: {} ('{}')", why, diagnosis.folder.string()),
              "give a folder on another disk: --folder DIR");
}

/// "oomdiag train --model unet --batch 9 --device rtx3060": the model as it was asked for, with these `arguments`, on the same device.
std::string command_line(const std::string& command, const TrainOptions& options,
                         const std::vector<std::string>& arguments) {
  std::vector<std::string> words{"oomdiag", command};
  for (const auto& more : {arguments_of_model(options.model), arguments})
    words.insert(words.end(), more.begin(), more.end());
  if (!options.device.device.empty()) words.insert(words.end(), {"--device", options.device.device});
  if (!options.device.memory.empty()) words.insert(words.end(), {"--memory", options.device.memory});
  return line_for_shell(words);
}

/// Where a loop that fits runs out of memory; with --all the first screen of that run, too.
void print_failing(const FailingBatch& failing, const Report& fitted, const TrainOptions& options) {
  const ReportFailure& failure = *main_device_of(failing.report)->failure;
  write_out(fmt::format("\n  with batch {} it runs out of memory in {}, {}\n", failing.batch, name_of(failure.phase),
                        place_text(failure, {.unicode = output_capabilities(STDOUT_FILENO).unicode})));
  const int64_t predicted = main_device_of(fitted)->batch->largest_batch;
  if (options.model.steps.empty() && predicted + 1 < failing.batch) {
    const std::string between = fmt::format("batch={}..{}", predicted, failing.batch);
    write_out(fmt::format("  the largest that fits, by runs: {}\n", command_line("fit", options, {"--vary", between})));
  }
  if (!options.all) return;
  write_out("\n");
  print_text(failing.report, stdout, false, command_line("train", options, {"--batch", std::to_string(failing.batch)}));
}

/// What is written and printed, and the exit code.
int finish(const TrainOptions& options, const Diagnosis& diagnosis, const std::optional<FailingBatch>& failing) {
  const Report& report = *diagnosis.report;
  if (!options.output.empty()) write_json(report, options.output);
  if (!options.html.empty()) write_page(load_explained(diagnosis.folder), options.html);
  options.json ? print_json(report) : print_text(report, stdout, options.all);
  if (failing && !options.json) print_failing(*failing, report, options);
  if (report.outcome == "out_of_memory") return kOutOfMemory;
  if (diagnosis.ending.code() == 0) return 0;
  complain(last_lines(diagnosis.folder / "output.txt"));
  return diagnosis.ending.signal == SIGINT ? kInterrupted : 1;
}

/// Runs the loop on the host, where nothing is recorded: the report has no GPU, and a case with the host's figures.
int train_on_host(const TrainOptions& options, const Model& model, const std::vector<std::string>& program) {
  const HostRun host = [&] {
    const Progress progress(fmt::format("training {} on the host ...", options.model.model));
    return run_on_host(program);
  }();
  if (host.ending.signal == SIGINT) return kInterrupted;
  if (host.ending.code() != 0) {
    throw Error(ErrorKind::environment,
                fmt::format("the training program ended with exit code {}\n{}", host.ending.code(), host.output));
  }
  const Report report{.exit_code = 0, .reference_case = explain_host(model.reference_case, model.about, host.facts)};
  if (!options.output.empty()) write_json(report, options.output);
  if (options.json) {
    print_json(report);
  } else {
    fmt::print("oomdiag: ran on the host\n\n{}", case_text(*report.reference_case));
  }
  return 0;
}

int train(TrainOptions options) {
  const Install install = find_install();
  const Model model = find_model(read_models(install.models), options.model.model);
  check_options(options, model);
  check_writable(options.output);
  check_writable(options.html, "--html");
  std::string& variant = options.model.variant;
  if (variant.empty() && !model.variants.empty()) variant = model.variants.front();
  if (options.device.device == "cpu") {
    return train_on_host(options, model, compose_program(options, model, install, variant, "cpu"));
  }
  const DeviceChoice device = choose_device(options.device, install);
  require_gpu(device);
  say_default(device);
  const CaseStudy study{model, variant, [&](const std::string& other, const std::string& where) {
                          return compose_program(options, model, install, other, where);
                        }};
  DiagnosisRequest request{.program = study.compose(variant, "cuda"),
                           .device = device,
                           .base = choose_base(options.folder),
                           .keeps_output = true};
  if (model.default_batch != 0) request.batch = options.batch != 0 ? options.batch : model.default_batch;
  std::optional<FailingBatch> failing;
  const Diagnosis diagnosis = [&] {
    const Progress progress(fmt::format("training {} on {} ...", options.model.model, describe(device)));
    Diagnosis result = diagnose(request, install);
    check_recording(result);
    complete(result, request, install);
    if (result.report && device.virtual_host() != nullptr && model.default_batch != 0) {
      failing = find_failing_batch(
          *result.report,
          [&](int64_t batch) {
            TrainOptions with_more = options;
            with_more.batch = batch;
            DiagnosisRequest with_batch = request;
            with_batch.program = compose_program(with_more, model, install, variant, "cuda");
            with_batch.batch = batch;
            return with_batch;
          },
          install);
    }
    if (result.report && result.ending.signal != SIGINT) {
      result.report->reference_case = study_case(study, request, result, install);
      keep_json(*result.report, result.folder);
    }
    return result;
  }();
  return diagnosis.report ? finish(options, diagnosis, failing) : give_up(diagnosis);
}

}  // namespace

void add_train(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<TrainOptions>();
  CLI::App& command = *app.add_subcommand("train", "run a reference training loop and explain its memory");
  set_help(command, {.example = "oomdiag train --model deepcnn --device rtx3060 --batch 6720",
                     .about = "Runs a reference training loop and explains its memory.\n"
                              "Exit code: 0 it fits, 3 out of memory, 1 failed.",
                     .usage = "oomdiag train [OPTIONS]"});
  command.add_option("--model", options->model.model, "one of oomdiag models")
      ->type_name("NAME")
      ->capture_default_str();
  command
      .add_option("--variant", options->model.variant,
                  "the loop that is reported; the case compares it with the model's others. default: its first")
      ->type_name("NAME");
  command.add_option("--batch", options->batch, "batch size; default: the model's own")
      ->type_name("N")
      ->check(range(1, 1 << 30));
  add_device_options(command, options->device);
  command.add_option("--steps", options->model.steps, "training steps; default: the model's own")
      ->type_name("N")
      ->check(range(1, 1 << 20));
  command.add_option("--optimizer", options->model.optimizer, "its optimizer; default: the model's own")
      ->type_name("adam|adamw|sgd|momentum")
      ->check(one_of({"adam", "adamw", "sgd", "momentum"}));
  command.add_option("--amp", options->model.amp, "automatic mixed precision; default: none")
      ->type_name("none|bf16|fp16")
      ->check(one_of({"none", "bf16", "fp16"}));
  command
      .add_option("--accumulate", options->model.accumulate,
                  "micro-batches that a step's batch is taken in; default: 1")
      ->type_name("N")
      ->check(range(1, 1 << 20));
  command.add_flag("--all", options->all,
                   "print every table, and of a loop that fits the report of a batch that does not");
  command.add_flag("--json", options->json, "print the report as JSON");
  add_json_file(command, options->output);
  add_page_file(command, options->html);
  add_runs_folder(command, options->folder);
  command.callback([options, &chosen] { chosen = [options] { return train(*options); }; });
}

}  // namespace oomdiag
