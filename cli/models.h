#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace oomdiag {

/// A reference model, as the samples program describes it.
struct Model {
  std::string name;
  std::string about;
  int64_t default_batch = 0;

  bool operator==(const Model&) const = default;
};

/// Reads the list that the samples program gave of itself when it was built. Throws Error(environment) if there is
/// none.
std::vector<Model> read_models(const std::filesystem::path& file);

/// The model of this name. Throws Error(usage) that names the nearest.
const Model& find_model(const std::vector<Model>& models, std::string_view wanted);

}  // namespace oomdiag
