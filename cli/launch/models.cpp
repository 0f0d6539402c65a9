#include "cli/launch/models.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/terminal/nearest.h"
#include "profiler/error.h"

namespace oomdiag {
nlohmann::json read_models_json(const std::filesystem::path& file) {
  std::ifstream stream(file);
  nlohmann::json models = nlohmann::json::parse(stream, nullptr, false);
  if (models.is_array()) return models;
  throw Error(ErrorKind::environment, fmt::format("the list of the models, '{}', is missing", file.string()),
              "build it: scripts/build");
}

std::vector<Model> read_models(const std::filesystem::path& file) {
  std::vector<Model> models;
  for (const nlohmann::json& entry : read_models_json(file)) {
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

const Model& find_model(const std::vector<Model>& models, std::string_view name) {
  std::vector<std::string> names;
  for (const Model& model : models) {
    if (model.name == name) return model;
    names.push_back(model.name);
  }
  throw Error(ErrorKind::usage, fmt::format("unknown model '{}'", name),
              did_you_mean(name, names, "oomdiag models lists them all"));
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

}  // namespace oomdiag
