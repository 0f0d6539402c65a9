#include "cli/models.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/help.h"
#include "cli/install.h"
#include "cli/json_text.h"
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
    fmt::print("{}\n", to_text(read(file)));
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

std::vector<Model> read_models(const std::filesystem::path& file) {
  std::vector<Model> models;
  for (const nlohmann::json& entry : read(file)) {
    models.push_back({.name = entry.value("name", ""),
                      .reference_case = entry.value("case", ""),
                      .variants = entry.value("variants", std::vector<std::string>()),
                      .about = entry.value("about", ""),
                      .default_batch = entry.value("default_batch", int64_t{0}),
                      .default_steps = entry.value("default_steps", int64_t{0}),
                      .default_optimizer = entry.value("default_optimizer", ""),
                      .takes_amp = entry.value("takes_amp", false),
                      .accumulates = entry.value("accumulates", false)});
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

void check_variant(const Model& model, std::string_view variant) {
  const auto& known = model.variants;
  if (variant.empty() || std::find(known.begin(), known.end(), variant) != known.end()) return;
  if (known.empty()) {
    throw Error(ErrorKind::usage, fmt::format("{} has no variants", model.name), "leave --variant away");
  }
  throw Error(ErrorKind::usage, fmt::format("{} has no variant '{}'", model.name, variant),
              fmt::format("valid: {}", fmt::join(known, ", ")));
}

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
