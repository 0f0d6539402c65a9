#include "cli/launch/programs.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>

#include "cli/launch/models.h"
#include "cli/process/files.h"
#include "cli/python/install.h"
#include "cli/python/python.h"
#include "cli/terminal/help.h"

namespace oomdiag {

void add_model_options(CLI::App& command, ModelOptions& options) {
  CLI::Option* const model =
      command.add_option("--model", options.model, "one of oomdiag models, in place of a program")->type_name("NAME");
  command.add_option("--variant", options.variant, "of the model")->type_name("NAME")->needs(model);
  command.add_option("--optimizer", options.optimizer, "of the model")
      ->type_name("adam|adamw|sgd|momentum")
      ->needs(model)
      ->check(one_of({"adam", "adamw", "sgd", "momentum"}));
  command.add_option("--amp", options.amp, "automatic mixed precision of the model")
      ->type_name("none|bf16|fp16")
      ->needs(model)
      ->check(one_of({"none", "bf16", "fp16"}));
  command.add_option("--accumulate", options.accumulate, "micro-batches that a step of the model takes its batch in")
      ->type_name("N")
      ->needs(model);
}

std::vector<std::string> arguments_of_model(const ModelOptions& options) {
  std::vector<std::string> arguments{"--model", options.model};
  const auto add = [&](const char* name, const std::string& value) {
    if (!value.empty()) arguments.insert(arguments.end(), {name, value});
  };
  add("--variant", options.variant);
  add("--steps", options.steps);
  add("--optimizer", options.optimizer);
  add("--amp", options.amp);
  add("--accumulate", options.accumulate);
  return arguments;
}

std::vector<std::string> program_of_model(const ModelOptions& options, const Model& model, const Install& install) {
  check_variant(model, options.variant);
  std::vector<std::string> program = arguments_of_model(options);
  program.insert(program.begin(), install.samples.string());
  return program;
}

namespace {

/// "train.py", which is no command of a shell: python runs it.
bool is_python_script(const std::string& word) {
  const std::filesystem::path file = word;
  const bool runs_itself = file.has_parent_path() && access(word.c_str(), X_OK) == 0;
  return file.extension() == ".py" && !runs_itself && is_file(file);
}

}  // namespace

std::vector<std::string> resolve_program(std::vector<std::string> program, Install& install) {
  if (program.empty()) return program;
  if (is_python_script(program.front())) program.insert(program.begin(), "python");
  if (program.front() == "train") program.front() = install.samples.string();
  if (program.front() != install.samples) program.front() = prepare_torch(program.front(), install);
  return program;
}

}  // namespace oomdiag
