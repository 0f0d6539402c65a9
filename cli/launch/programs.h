#pragma once

#include <string>
#include <vector>

#include "cli/launch/models.h"
#include "cli/python/install.h"

namespace CLI {
class App;
}

namespace oomdiag {

/// A reference model and what is asked of it; what is empty is left to the model.
struct ModelOptions {
  std::string model{}, variant{}, steps{}, optimizer{}, amp{}, accumulate{};
};

/// Adds --model, --variant, --optimizer, --amp and --accumulate to a command that takes programs too.
void add_model_options(CLI::App& command, ModelOptions& options);

/// What is asked, as it is typed: "--model", "unet", "--amp", "bf16".
std::vector<std::string> arguments_of_model(const ModelOptions& options);

/// The samples program for these options, without a batch size.
std::vector<std::string> program_of_model(const ModelOptions& options, const Model& model, const Install& install);

/// What somebody typed behind "--", with a python that has a torch in the place of python, and `install` made the one for that
/// torch (python.h). Which one it is is said on stderr.
std::vector<std::string> resolve_program(std::vector<std::string> program, Install& install);

}  // namespace oomdiag
