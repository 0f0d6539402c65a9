#include "cli/launch/programs.h"

#include <CLI/CLI.hpp>

#include "cli/python/python.h"
#include "cli/terminal/help.h"

namespace oomdiag {

void add_model_options(CLI::App& command, ModelOptions& options) {
  command.add_option("--model", options.model, "one of oomdiag models, in place of a program")->type_name("NAME");
  command.add_option("--variant", options.variant, "of the model")->type_name("NAME");
  command.add_option("--optimizer", options.optimizer, "of the model")
      ->type_name("adam|adamw|sgd|momentum")
      ->check(one_of({"adam", "adamw", "sgd", "momentum"}));
  command.add_option("--amp", options.amp, "automatic mixed precision of the model")
      ->type_name("none|bf16|fp16")
      ->check(one_of({"none", "bf16", "fp16"}));
  command.add_option("--accumulate", options.accumulate, "micro-batches that a step of the model takes its batch in")
      ->type_name("N");
}

std::vector<std::string> program_of_model(const ModelOptions& options, const Model& model, const Install& install) {
  check_variant(model, options.variant);
  std::vector<std::string> program{install.samples.string(), "--model", model.name};
  const auto add = [&](const char* name, const std::string& value) {
    if (!value.empty()) program.insert(program.end(), {name, value});
  };
  add("--variant", options.variant);
  add("--steps", options.steps);
  add("--optimizer", options.optimizer);
  add("--amp", options.amp);
  add("--accumulate", options.accumulate);
  return program;
}

std::vector<std::string> resolve_program(std::vector<std::string> program, Install& install) {
  if (program.empty()) return program;
  if (program.front() == "train") program.front() = install.samples.string();
  if (program.front() != install.samples) program.front() = prepare_torch(program.front(), install);
  return program;
}

}  // namespace oomdiag
