#include "cli/launch/topology.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <regex>

#include "profiler/error.h"

namespace oomdiag {
namespace {

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
