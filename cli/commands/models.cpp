#include "cli/launch/models.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands/commands.h"
#include "cli/python/install.h"
#include "cli/terminal/help.h"
#include "cli/terminal/json_text.h"

namespace oomdiag {
namespace {

int print_models(bool as_json) {
  const std::filesystem::path file = find_install().models;
  if (as_json) {
    fmt::print("{}\n", to_text(read_models_json(file)));
    return 0;
  }
  fmt::print("{:<17} {:<5} {:>6}  {}\n", "model", "case", "batch", "about");
  for (const Model& model : read_models(file)) {
    const std::string batch = model.default_batch == 0 ? "" : std::to_string(model.default_batch);
    fmt::print("{:<17} {:<5} {:>6}  {}\n", model.name, model.reference_case, batch, model.about);
    if (!model.variants.empty()) fmt::print("{:<32}{}\n", "", fmt::join(model.variants, ", "));
  }
  fmt::print("\nnext: oomdiag train --model deepcnn --device rtx3060\n");
  return 0;
}

}  // namespace

void add_models(CLI::App& app, Command& chosen) {
  auto as_json = std::make_shared<bool>(false);
  CLI::App& command = *app.add_subcommand("models", "list the reference models");
  set_help(
      command,
      {.example = "oomdiag models",
       .about = "Lists the reference models of oomdiag train: the case that each shows, its batch size, its variants.",
       .usage = "oomdiag models [OPTIONS]"});
  command.add_flag("--json", *as_json, "print JSON");
  command.callback([as_json, &chosen] { chosen = [as_json] { return print_models(*as_json); }; });
}

}  // namespace oomdiag
