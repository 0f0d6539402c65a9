#include "cli/process/process_tree.h"

#include <charconv>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string>

namespace oomdiag {
namespace {

struct Stat {
  pid_t parent = 0;
  uint64_t start = 0;
};

/// From "4711 (name) S parent ...": the name may hold anything (man 5 proc_pid_stat).
std::optional<Stat> read_stat(const std::filesystem::path& process) {
  constexpr int kFieldsBetween = 17;  // of the parent, field 4, and the start, field 22
  std::string line;
  std::getline(std::ifstream(process / "stat"), line);
  const std::size_t after_name = line.rfind(')');
  if (after_name == line.npos) return std::nullopt;
  std::istringstream fields(line.substr(after_name + 1));
  std::string skipped;
  Stat stat;
  fields >> skipped >> stat.parent;
  for (int i = 0; i < kFieldsBetween; ++i) fields >> skipped;
  if (!(fields >> stat.start)) return std::nullopt;
  return stat;
}

void add_tree(const KnownProcess& root, const std::multimap<pid_t, KnownProcess>& children,
              std::vector<KnownProcess>& tree) {
  tree.push_back(root);
  const auto [first, last] = children.equal_range(root.pid);
  for (auto child = first; child != last; ++child) add_tree(child->second, children, tree);
}

std::filesystem::path folder_of(pid_t pid) { return std::filesystem::path("/proc") / std::to_string(pid); }

}  // namespace

std::vector<KnownProcess> find_tree(pid_t root) {
  std::multimap<pid_t, KnownProcess> children;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
    const std::string name = entry.path().filename();
    pid_t pid = 0;
    if (std::from_chars(name.data(), name.data() + name.size(), pid).ec != std::errc{}) continue;
    if (const auto stat = read_stat(entry.path())) children.emplace(stat->parent, KnownProcess{pid, stat->start});
  }
  std::vector<KnownProcess> tree;
  if (const auto stat = read_stat(folder_of(root))) add_tree({root, stat->start}, children, tree);
  return tree;
}

void kill_processes(const std::vector<KnownProcess>& processes) {
  for (const KnownProcess& process : processes) {
    const auto now = read_stat(folder_of(process.pid));
    if (now && now->start == process.start) kill(process.pid, SIGKILL);
  }
}

}  // namespace oomdiag
