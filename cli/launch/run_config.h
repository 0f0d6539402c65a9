#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "cli/launch/diagnosis.h"
#include "cli/launch/ranks.h"

namespace oomdiag {

/// How a run was started, so that it can be started again: `run.json` in its folder.
struct RunConfig {
  std::vector<std::string> program;
  std::string directory;  ///< where it was started
  std::string device;     ///< as after --device; "real" for what was there
  int64_t memory_bytes = 0;
  bool clocked = false;
  std::optional<int64_t> batch{};
  std::optional<SingleRank> rank{};  ///< without the GPU of its topology, which is in `device`
  std::vector<std::pair<std::string, std::string>> environment{};  ///< the settings of torch and CUDA that were set

  bool operator==(const RunConfig&) const = default;
};

/// How `request` is started here and now.
RunConfig run_config_of(const DiagnosisRequest& request);

void write_run_config(const RunConfig& config, const std::filesystem::path& folder) noexcept;

/// That of a folder rank-N lies beside it. Throws Error(input) if there is none.
RunConfig read_run_config(const std::filesystem::path& folder);

}  // namespace oomdiag
