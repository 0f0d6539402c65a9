#include "profiler/host.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

// /proc/self/cgroup names the groups of this process, /proc/self/mountinfo where their trees are mounted and which part of
// them: in a container mostly its own group only, under whose path /proc/self/cgroup still has it (man 7 cgroups).

namespace oomdiag {
namespace fs = std::filesystem;
namespace {

/// A mounted tree of groups.
struct Mount {
  fs::path place;    ///< where it is mounted
  std::string part;  ///< the group that is seen there, "/" for the whole tree
};

fs::path below(const fs::path& root, const std::string& path) { return root / fs::path(path).relative_path(); }

bool is_listed(const std::string& list, const std::string& name) {
  return ("," + list + ",").find("," + name + ",") != std::string::npos;
}

/// The mount of version 2, or of a controller of version 1.
std::optional<Mount> find_mount(const fs::path& root, const std::string& controller) {
  std::ifstream file(root / "proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string skipped, part, place, type, source, options;
    words >> skipped >> skipped >> skipped >> part >> place;
    while (words >> skipped && skipped != "-") {
    }
    words >> type >> source >> options;
    const bool is_it = controller.empty() ? type == "cgroup2" : type == "cgroup" && is_listed(options, controller);
    if (is_it) return Mount{below(root, place), part};
  }
  return std::nullopt;
}

/// The path of our group in version 2, or in the tree of a controller of version 1.
std::optional<std::string> find_group(const fs::path& root, const std::string& controller) {
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == line.npos || second == line.npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_it = controller.empty() ? controllers.empty() : is_listed(controllers, controller);
    if (is_it) return line.substr(second + 1);
  }
  return std::nullopt;
}

/// The folders of our group and of those above it, as far as they are mounted here.
std::vector<fs::path> find_groups(const fs::path& root, const std::string& controller) {
  const std::optional<Mount> mount = find_mount(root, controller);
  const std::optional<std::string> group = find_group(root, controller);
  if (!mount || !group) return {};
  const fs::path inside = fs::path(*group).lexically_relative(mount->part);
  fs::path folder = mount->place;
  std::vector<fs::path> folders{folder};
  if (inside.empty() || *inside.begin() == ".." || inside == ".") return folders;
  for (const fs::path& name : inside) folders.insert(folders.begin(), folder /= name);
  return folders;
}

std::optional<int64_t> read_number(const fs::path& file) {
  std::ifstream stream(file);
  int64_t number = 0;
  if (stream >> number) return number;
  return std::nullopt;  // not there, or "max"
}

/// The number behind a word in a file of lines "word number".
std::optional<int64_t> read_entry(const fs::path& file, const std::string& word) {
  std::ifstream stream(file);
  std::string name;
  for (int64_t number = 0; stream >> name >> number;) {
    if (name == word) return number;
  }
  return std::nullopt;
}

/// Names of a version's files.
struct MemoryFiles {
  const char *controller, *limit, *used, *cache, *kills_file;
};
constexpr MemoryFiles kMemoryFiles[] = {
    {"", "memory.max", "memory.current", "inactive_file", "memory.events"},
    {"memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"}};

std::optional<int64_t> left_in_group(const fs::path& group, const MemoryFiles& files) {
  const std::optional<int64_t> limit = read_number(group / files.limit), used = read_number(group / files.used);
  if (!limit || !used) return std::nullopt;
  return std::max<int64_t>(0, *limit - *used + read_entry(group / "memory.stat", files.cache).value_or(0));
}

/// The bytes that a line of /proc/meminfo tells, "MemTotal:  64000000 kB".
std::optional<int64_t> memory_of_machine(const fs::path& root, const char* line) {
  std::ifstream file(root / "proc/meminfo");
  for (std::string name, rest; file >> name; std::getline(file, rest)) {
    int64_t kibibytes = 0;
    if (name == line && file >> kibibytes) return kibibytes * 1024;
  }
  return std::nullopt;
}

std::optional<int64_t> smaller(std::optional<int64_t> a, std::optional<int64_t> b) {
  return a && b ? std::min(*a, *b) : a ? a : b;
}

/// Cores' worth of time that a group has; nullopt = no bound.
std::optional<int64_t> quota_of(const fs::path& group, bool is_version_2) {
  std::optional<int64_t> quota, period;
  if (is_version_2) {
    std::ifstream stream(group / "cpu.max");  // "200000 100000" or "max 100000"
    int64_t first = 0, second = 0;
    if (stream >> first >> second) quota = first, period = second;
  } else {
    quota = read_number(group / "cpu.cfs_quota_us");  // -1 = none
    period = read_number(group / "cpu.cfs_period_us");
  }
  if (!quota || !period || *quota <= 0 || *period <= 0) return std::nullopt;
  return *quota / *period;
}

int64_t cores_of_affinity() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

std::optional<int64_t> total_memory(const fs::path& root) {
  std::optional<int64_t> least = memory_of_machine(root, "MemTotal:");
  for (const MemoryFiles& files : kMemoryFiles) {
    for (const fs::path& group : find_groups(root, files.controller))
      least = smaller(least, read_number(group / files.limit));
  }
  return least;
}

std::optional<int64_t> available_memory(const fs::path& root) {
  std::optional<int64_t> least = memory_of_machine(root, "MemAvailable:");
  for (const MemoryFiles& files : kMemoryFiles) {
    for (const fs::path& group : find_groups(root, files.controller))
      least = smaller(least, left_in_group(group, files));
  }
  return least;
}

int available_cores(const fs::path& root) {
  std::optional<int64_t> least = cores_of_affinity();
  for (const fs::path& group : find_groups(root, "")) least = smaller(least, quota_of(group, true));
  for (const fs::path& group : find_groups(root, "cpu")) least = smaller(least, quota_of(group, false));
  return static_cast<int>(std::max<int64_t>(1, *least));
}

std::optional<int64_t> count_oom_kills(const fs::path& root) {
  for (const MemoryFiles& files : kMemoryFiles) {
    const std::vector<fs::path> groups = find_groups(root, files.controller);
    if (groups.empty()) continue;
    if (const auto kills = read_entry(groups.front() / files.kills_file, "oom_kill")) return kills;
  }
  return std::nullopt;
}

}  // namespace oomdiag
