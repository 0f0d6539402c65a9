#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace oomdiag {

/// A reference model, as the samples program describes it.
struct Model {
  std::string name;
  std::string reference_case{};         ///< "S7", or empty
  std::vector<std::string> variants{};  ///< the first is the default
  std::string about{};
  int64_t default_batch = 0;        ///< 0: it has no batches
  int64_t default_steps = 0;        ///< 0: it has no steps
  std::string default_optimizer{};  ///< empty: it has none to choose
  bool takes_amp = false;
  bool accumulates = false;  ///< can take its batch in parts

  bool operator==(const Model&) const = default;
};

/// The list that the samples program gave of itself when it was built, as it is. Throws Error(environment) if there is none.
nlohmann::json read_models_json(const std::filesystem::path& file);

/// The same, read. Throws likewise.
std::vector<Model> read_models(const std::filesystem::path& file);

/// The model of this name. Throws Error(usage) that names the nearest.
const Model& find_model(const std::vector<Model>& models, std::string_view name);

/// Throws Error(usage) with the valid ones if the model has no such variant. Empty is fine.
void check_variant(const Model& model, std::string_view variant);

}  // namespace oomdiag
