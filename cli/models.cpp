#include "cli/models.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/help.h"
#include "cli/install.h"
#include "cli/nearest.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

nlohmann::json read(const std::filesystem::path& file) {
  std::ifstream stream(file);
  nlohmann::json models = nlohmann::json::parse(stream, nullptr, false);
  if (models.is_array()) return models;
  throw Error(ErrorKind::environment, fmt::format("the list of the models, '{}', is missing", file.string()),
              "build it: scripts/build");
}

int print_models(bool as_json) {
  const std::filesystem::path file = find_install().models;
  if (as_json) {
    fmt::print("{}\n", read(file).dump(2));
    return 0;
  }
  fmt::print("{:<12} {:>6}  {}\n", "model", "batch", "about");
  for (const Model& model : read_models(file))
    fmt::print("{:<12} {:>6}  {}\n", model.name, model.default_batch, model.about);
  fmt::print("\nnext: oomdiag train --model deepcnn --device rtx3060\n");
  return 0;
}

}  // namespace

std::vector<Model> read_models(const std::filesystem::path& file) {
  std::vector<Model> models;
  for (const nlohmann::json& entry : read(file)) {
    models.push_back({.name = entry.value("name", ""),
                      .about = entry.value("about", ""),
                      .default_batch = entry.value("default_batch", int64_t{0})});
  }
  return models;
}

const Model& find_model(const std::vector<Model>& models, std::string_view wanted) {
  std::vector<std::string> names;
  for (const Model& model : models) {
    if (model.name == wanted) return model;
    names.push_back(model.name);
  }
  throw Error(ErrorKind::usage, fmt::format("unknown model '{}'", wanted),
              did_you_mean(wanted, names, "oomdiag models lists them all"));
}

void add_models(CLI::App& app, Command& chosen) {
  auto as_json = std::make_shared<bool>(false);
  CLI::App& command = *app.add_subcommand("models", "list the reference models");
  set_help(command, {.example = "oomdiag models",
                     .about = "Lists the reference models of oomdiag train, with their own batch sizes.",
                     .usage = "oomdiag models [OPTIONS]"});
  command.add_flag("--json", *as_json, "print JSON");
  command.callback([as_json, &chosen] { chosen = [as_json] { return print_models(*as_json); }; });
}

}  // namespace oomdiag
