#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <fstream>
#include <memory>

#include "cli/commands.h"
#include "cli/diagnosis.h"
#include "cli/help.h"
#include "cli/models.h"
#include "cli/reports.h"
#include "cli/run_folder.h"
#include "cli/terminal.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

constexpr int kOutOfMemory = 3;
constexpr int kInterrupted = 130;

struct Options {
  std::string model = "deepcnn";
  int64_t batch = 0;  ///< 0 = the model's own
  int64_t steps = 2;
  std::string optimizer = "adam";
  std::string amp = "none";
  DeviceOptions device;
  std::string folder;
  std::string output;
  bool json = false;
};

std::vector<std::string> compose_program(const Options& options, const Install& install) {
  std::vector<std::string> program{
      install.samples.string(), "--model", options.model, "--steps", std::to_string(options.steps), "--optimizer",
      options.optimizer,        "--amp",   options.amp};
  program.insert(program.end(), {"--batch", std::to_string(options.batch), "--device", "cuda"});
  return program;
}

/// The samples program said what is wrong; its last lines are worth more than ours.
std::string last_lines(const std::filesystem::path& file) {
  constexpr std::size_t kMostLines = 5;
  std::ifstream stream(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) {
    if (!line.empty()) lines.push_back(line);
    if (lines.size() > kMostLines) lines.erase(lines.begin());
  }
  std::string text;
  for (const std::string& line : lines) text += "  " + line + "\n";
  return text;
}

int give_up(const Diagnosis& diagnosis) {
  const std::string last = last_lines(diagnosis.folder / "output.txt");
  remove_empty_run(diagnosis.folder);
  if (diagnosis.ending.signal == SIGINT) return kInterrupted;
  throw Error(ErrorKind::environment, fmt::format("the training program ended with exit code {}; {}\n{}",
                                                  diagnosis.ending.code(), diagnosis.why_no_report, last));
}

int train(Options options) {
  const Install install = find_install();
  const Model model = find_model(read_models(install.models), options.model);
  if (options.batch == 0) options.batch = model.default_batch;
  const DeviceChoice device = choose_device(options.device, install);
  check_writable(options.output);
  say_default(device);
  const DiagnosisRequest request{.program = compose_program(options, install),
                                 .device = device,
                                 .base = choose_base(options.folder),
                                 .batch = options.batch,
                                 .keeps_output = true};
  const Diagnosis diagnosis = [&] {
    const Progress progress(fmt::format("training {} on {} ...", options.model, describe(device)));
    return diagnose(request, install);
  }();
  if (!diagnosis.report) return give_up(diagnosis);

  const Report& report = *diagnosis.report;
  if (!options.output.empty()) write_json(report, options.output);
  options.json ? print_json(report) : print_text(report, stdout);
  if (report.outcome == "out_of_memory") return kOutOfMemory;
  if (diagnosis.ending == Ending{}) return 0;
  fmt::print(stderr, "{}", last_lines(diagnosis.folder / "output.txt"));
  return diagnosis.ending.signal == SIGINT ? kInterrupted : 1;
}

}  // namespace

void add_train(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<Options>();
  CLI::App& command = *app.add_subcommand("train", "run a reference training loop and explain its memory");
  set_help(command, {.example = "oomdiag train --model deepcnn --device rtx3060 --batch 6800",
                     .about = "Runs a reference training loop and explains its memory.\n"
                              "Exit code: 0 it fits, 3 out of memory, 1 failed.",
                     .usage = "oomdiag train [OPTIONS]"});
  command.add_option("--model", options->model, "one of oomdiag models")->type_name("NAME")->capture_default_str();
  command.add_option("--batch", options->batch, "batch size; default: the model's own")
      ->type_name("N")
      ->check(range(1, 1 << 30));
  add_device_options(command, options->device);
  command.add_option("--steps", options->steps, "training steps")
      ->type_name("N")
      ->check(range(1, 1 << 20))
      ->capture_default_str();
  command.add_option("--optimizer", options->optimizer, "its optimizer")
      ->type_name("adam|adamw|sgd|momentum")
      ->check(one_of({"adam", "adamw", "sgd", "momentum"}))
      ->capture_default_str();
  command.add_option("--amp", options->amp, "automatic mixed precision")
      ->type_name("none|bf16|fp16")
      ->check(one_of({"none", "bf16", "fp16"}))
      ->capture_default_str();
  command.add_flag("--json", options->json, "print the report as JSON");
  command.add_option("-o,--output", options->output, "write the report as JSON to this file")->type_name("FILE");
  command.add_option("--folder", options->folder, "where to make the run folder oomdiag-<pid>; default: here")
      ->type_name("DIR");
  command.callback([options, &chosen] { chosen = [options] { return train(*options); }; });
}

}  // namespace oomdiag
