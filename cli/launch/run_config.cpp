#include "cli/launch/run_config.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>

#include "cli/device/device.h"
#include "cli/device/gpus.h"
#include "cli/launch/diagnosis.h"
#include "cli/launch/ranks.h"
#include "cli/reports/reports.h"
#include "cli/reports/run_folder.h"
#include "cli/terminal/json_text.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

constexpr const char* kSchema = "oomdiag-run/1";

/// What changes how a program of torch takes memory, by the beginning of its name.
constexpr std::array<std::string_view, 6> kSettings{"PYTORCH_", "TORCH", "CUDA_", "CUBLAS", "CUDNN_", "NCCL_"};

std::vector<std::pair<std::string, std::string>> settings_of_torch() {
  std::vector<std::pair<std::string, std::string>> found;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    for (const std::string_view prefix : kSettings) {
      if (equals != text.npos && text.starts_with(prefix)) {
        found.emplace_back(text.substr(0, equals), text.substr(equals + 1));
        break;
      }
    }
  }
  return found;
}

nlohmann::ordered_json to_json(const std::optional<SingleRank>& rank) {
  if (!rank) return nullptr;
  return {{"number", rank->number},
          {"world_size", rank->job.world_size},
          {"local_world_size", rank->job.local_world_size},
          {"links", rank->job.topology.links}};
}

/// Of several ranks that were run each folder is named after its own.
std::optional<SingleRank> read_rank(const nlohmann::json& json, const std::filesystem::path& folder) {
  if (!json.is_object()) return std::nullopt;
  SingleRank rank{.number = json.at("number")};
  const std::string name = folder.filename().string();
  if (name.starts_with(kRankFolder)) rank.number = std::atoi(name.c_str() + kRankFolder.size());
  rank.job = {.world_size = json.at("world_size"),
              .local_world_size = json.at("local_world_size"),
              .ranks = {rank.number},
              .topology = {.links = json.at("links")}};
  return rank;
}

}  // namespace

RunConfig run_config_of(const DiagnosisRequest& request) {
  std::error_code ignored;
  RunConfig config{.program = request.program,
                   .directory = std::filesystem::current_path(ignored).string(),
                   .device = "real",
                   .batch = request.batch,
                   .rank = request.rank,
                   .environment = settings_of_torch()};
  const VirtualHost* const host = request.device.virtual_host();
  if (host == nullptr) return config;
  config.memory_bytes = host->memory_bytes;
  config.clocked = host->clocked;
  config.device.clear();
  for (const GpuEntry& gpu : host->gpus) {
    config.device += (config.device.empty() ? "" : ",") + gpu.file.string();
  }
  return config;
}

void write_run_config(const RunConfig& config, const std::filesystem::path& folder) noexcept try {
  nlohmann::ordered_json json = {
      {"schema", kSchema},       {"program", config.program},           {"directory", config.directory},
      {"device", config.device}, {"memory_bytes", config.memory_bytes}, {"clocked", config.clocked}};
  json["batch"] = optional_json(config.batch);
  json["rank"] = to_json(config.rank);
  json["environment"] = nlohmann::ordered_json::object();
  for (const auto& [name, value] : config.environment) json["environment"][name] = value;
  write_whole(to_text(json) + "\n", folder / kRunConfigFile, 0600);  // it holds the command line
} catch (...) {  // the run itself is worth more than the note of how it was started
}

RunConfig read_run_config(const std::filesystem::path& folder) {
  std::ifstream stream(run_config_file(folder));
  const auto json = nlohmann::json::parse(stream, nullptr, /*allow_exceptions=*/false);
  try {
    if (json.is_object() && json.at("schema") == kSchema) {
      RunConfig config{.program = json.at("program"),
                       .directory = json.at("directory"),
                       .device = json.at("device"),
                       .memory_bytes = json.at("memory_bytes"),
                       .clocked = json.at("clocked")};
      if (!json.at("batch").is_null()) config.batch = json.at("batch").get<int64_t>();
      config.rank = read_rank(json.value("rank", nlohmann::json()), folder);
      for (const auto& [name, value] : json.at("environment").items()) config.environment.emplace_back(name, value);
      if (!config.program.empty()) return config;
    }
  } catch (const nlohmann::json::exception&) {  // said below
  }
  throw Error(ErrorKind::input, fmt::format("'{}' does not say how its program was started", folder.string()),
              "name the program: oomdiag fix --device NAME -- PROGRAM");
}

}  // namespace oomdiag
