#include "cli/launch/ranks.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <fstream>
#include <regex>
#include <sstream>

#include "cli/device/device.h"
#include "cli/device/gpus.h"
#include "cli/process/environment.h"
#include "cli/process/launcher.h"
#include "cli/python/install.h"
#include "cli/terminal/help.h"
#include "extension/environment.h"
#include "profiler/error.h"
#include "profiler/whole_number.h"

namespace oomdiag {
namespace {

constexpr int kMaxRanks = 1 << 20;
constexpr int kGpusOfHost = 8;

int read_rank(const std::string& text, int world_size) {
  const std::optional<int64_t> rank = parse_whole_number(text);
  if (rank && *rank >= 0 && *rank < world_size) return static_cast<int>(*rank);
  throw Error(ErrorKind::usage, fmt::format("'{}' is no rank of {}", text, world_size),
              fmt::format("valid: 0 to {}", world_size - 1));
}

std::vector<int> read_ranks(const std::string& list, int world_size) {
  std::vector<int> ranks;
  std::istringstream names(list);
  for (std::string name; std::getline(names, name, ',');) ranks.push_back(read_rank(name, world_size));
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  if (ranks.empty()) throw Error(ErrorKind::usage, "--ranks names no rank", "as in: --ranks 0,7,63");
  return ranks;
}

[[noreturn]] void reject(const std::string& text) {
  throw Error(ErrorKind::usage, fmt::format("'{}' is no topology", text),
              "GPUs of a host, links between them (nvlink, pcie, shm) and between hosts (ib, roce, efa, tcp), as in: "
              "8xh100-nvlink,ib");
}

std::string network_of(const std::string& name, const std::string& text) {
  constexpr std::array kRdma{"ib", "infiniband", "roce", "efa", "rdma"};
  constexpr std::array kTcp{"tcp", "ethernet"};
  if (std::find(kRdma.begin(), kRdma.end(), name) != kRdma.end()) return ",rdma";
  if (std::find(kTcp.begin(), kTcp.end(), name) != kTcp.end()) return ",tcp";
  reject(text);
}

}  // namespace

void add_rank_options(CLI::App& command, RankOptions& options) {
  command
      .add_option("--world-size", options.world_size,
                  "run as one rank of a job of so many, on a virtual host; no other rank need be there")
      ->type_name("N")
      ->check(range(1, kMaxRanks));
  command.add_option("--rank", options.rank, "which one; default: 0")->type_name("R")->check(range(0, kMaxRanks - 1));
  command
      .add_option("--ranks", options.ranks, "several, each alone, in one report: 0,7,63, or distinct: one of each kind")
      ->type_name("LIST");
  add_host_options(command, options);
}

void add_host_options(CLI::App& command, RankOptions& options) {
  command
      .add_option("--local-world-size", options.local_world_size, "ranks of a job, and so GPUs, of a host; default: 8")
      ->type_name("N")
      ->check(range(1, kMaxGpus));
  command
      .add_option("--topology", options.topology,
                  "GPUs of a host, links between them and between hosts, for NCCL's buffers: 8xh100-nvlink,ib")
      ->type_name("TEXT");
}

Job choose_job(const RankOptions& options, int device_count) {
  const bool names_rank = options.rank >= 0 || !options.ranks.empty();
  if (!options.is_job() && (names_rank || options.local_world_size > 0 || !options.topology.empty())) {
    throw Error(ErrorKind::usage, "a rank needs the size of its job", "as in: --world-size 64 --rank 5");
  }
  if (!options.is_job()) return {};
  if (options.rank >= 0 && !options.ranks.empty()) {
    throw Error(ErrorKind::usage, "--rank and --ranks exclude each other", "as in: --world-size 64 --ranks 0,5");
  }
  const TopologyChoice topology = options.hosts();
  int gpus = device_count > 1 ? device_count : kGpusOfHost;
  if (topology.gpus > 0) gpus = std::min(topology.gpus, kMaxGpus);
  Job job{.world_size = options.world_size,
          .local_world_size = options.local_world_size > 0 ? options.local_world_size : gpus,
          .topology = topology};
  job.local_world_size = std::min(job.local_world_size, job.world_size);
  job.is_distinct = options.ranks == "distinct";
  if (job.is_distinct) return job;
  job.ranks = options.ranks.empty()
                  ? std::vector<int>{read_rank(std::to_string(std::max(0, options.rank)), options.world_size)}
                  : read_ranks(options.ranks, options.world_size);
  return job;
}

DeviceOptions device_of(const Job& job, DeviceOptions device) {
  if (job.topology.gpu.empty()) return device;
  if (!device.device.empty()) {
    throw Error(ErrorKind::usage, "--device and --topology both name a GPU", "leave one of them out");
  }
  device.device = job.topology.gpu;
  return device;
}

VirtualHost host_of(const Job& job, VirtualHost host) {
  const auto count = static_cast<std::size_t>(job.local_world_size);
  if (host.gpus.size() == 1) host.gpus.resize(count, GpuEntry(host.gpus.front()));
  if (host.gpus.size() >= count) return host;
  throw Error(ErrorKind::usage, fmt::format("a host of {} ranks has {} GPUs", job.local_world_size, host.gpus.size()),
              "name one GPU, which all have, or one for each rank");
}

VirtualHost host_of(const Job& job, const DeviceChoice& choice) {
  if (const VirtualHost* const host = choice.virtual_host()) return host_of(job, *host);
  throw Error(ErrorKind::usage, "a rank whose job is not there runs on a virtual device only",
              "name one: --device h100-sxm");
}

std::vector<int> read_stages(const std::filesystem::path& folder) {
  std::ifstream file(folder / "stages");
  std::string line;
  std::getline(file, line);
  std::istringstream numbers(line);
  std::vector<int> ranks;
  for (int rank = 0; numbers >> rank;) ranks.push_back(rank);
  return ranks;
}

Environment environment_of_rank(const SingleRank& single, const std::filesystem::path& folder, const Install& install) {
  const auto& [job, rank] = single;
  const int local = job.local_world_size;
  Environment variables;
  const auto set = [&](const char* name, const auto& value) { variables.emplace_back(name, fmt::format("{}", value)); };
  const auto set_default = [&](const char* name, const char* value) {
    if (environment(name).empty()) set(name, value);
  };
  // https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables"
  set("RANK", rank);
  set("LOCAL_RANK", rank % local);
  set("WORLD_SIZE", job.world_size);
  set("LOCAL_WORLD_SIZE", local);
  set("GROUP_RANK", rank / local);
  set("GROUP_WORLD_SIZE", (job.world_size + local - 1) / local);
  set("ROLE_NAME", "default");
  set("ROLE_RANK", rank);
  set("ROLE_WORLD_SIZE", job.world_size);
  set_default("MASTER_ADDR", "localhost");
  set_default("MASTER_PORT", "29500");
  set("TORCHELASTIC_RESTART_COUNT", 0);
  set("TORCHELASTIC_MAX_RESTARTS", 0);
  set("TORCHELASTIC_RUN_ID", "oomdiag");
  set_default("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
  if (!job.topology.links.empty()) set(variables::kTopology, job.topology.links);
  if (local > 1) set_default("OMP_NUM_THREADS", "1");
  // The monitor asks the store from a thread of its own, and ours needs Python's lock to answer.
  set_default("TORCH_NCCL_ENABLE_MONITORING", "0");
  set(variables::kRankJob, folder.string());
  set(variables::kRankFolder, std::filesystem::current_path().string());
  set("PYTHONPATH", before_python_path(install.injected()));
  return variables;
}

TopologyChoice read_topology(const std::string& text) {
  static const std::regex pattern("(?:([0-9]{1,3})x)?(?:(.*?)-)?(nvlink|pcie|shm)?(?:,([a-z]+))?");
  std::smatch parts;
  const bool is_one = std::regex_match(text, parts, pattern);
  if (!is_one || text.empty() || (!parts[3].matched && !parts[4].matched)) reject(text);
  TopologyChoice choice{.gpu = parts[2].str(), .links = parts[3].str()};
  if (parts[1].matched) choice.gpus = std::stoi(parts[1].str());
  if (parts[1].matched && choice.gpus == 0) reject(text);
  if (parts[4].matched) choice.links += network_of(parts[4].str(), text);
  return choice;
}

}  // namespace oomdiag
