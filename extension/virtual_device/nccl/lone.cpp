#include "extension/virtual_device/nccl/lone.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>

#include "extension/environment.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/locks.h"
#include "extension/virtual_device/nccl/start_rank.h"

namespace oomdiag {
namespace {

using Key = std::array<char, NCCL_UNIQUE_ID_BYTES>;

Key key_of(const ncclUniqueId& id) {
  Key key;
  std::memcpy(key.data(), id.internal, key.size());
  return key;
}

const char* job_folder() noexcept {
  static const char* const folder = std::getenv(variables::kRankJob);
  return folder;
}

// Never destroyed: communicators end in static destructors.
auto& lock = *new LibraryLock;
auto& groups = *new std::map<Key, LoneGroup>;
auto& expected_parts = *new std::deque<std::vector<int>>;

std::string rank_file(int rank) { return lone_file("rank-" + std::to_string(rank)); }

int own_rank() {
  const char* text = std::getenv("RANK");
  return text ? std::atoi(text) : 0;
}

std::string wait_file(int rank) { return lone_file("waits-" + std::to_string(rank)); }

/// Whether who waits for `rank` waits, by way of others, for itself.
bool waits_for_itself(int rank) {
  constexpr int kLongestCircle = 64;
  for (int i = 0; i < kLongestCircle; ++i) {
    std::ifstream file(wait_file(rank));
    if (!(file >> rank)) return false;
    if (rank == own_rank()) return true;
  }
  return false;
}

/// The process id of a rank; 0 = not there, -1 = being started.
pid_t process_of(int rank) {
  std::ifstream file(rank_file(rank));
  if (!file) return 0;
  pid_t pid = 0;
  return file >> pid ? pid : -1;
}

}  // namespace

bool is_lone() noexcept { return job_folder() != nullptr; }

std::string lone_file(const std::string& name) { return std::string(job_folder()) + "/" + name; }

LoneGroup find_lone_group(const ncclUniqueId& id, int count) {
  std::lock_guard guard(lock);
  const auto found = groups.find(key_of(id));
  if (found != groups.end() && found->second.ranks.size() == static_cast<size_t>(count)) return found->second;
  LoneGroup group{.id = id, .ranks = std::vector<int>(static_cast<size_t>(count))};
  std::iota(group.ranks.begin(), group.ranks.end(), 0);
  return group;
}

void tell_lone_group(const ncclUniqueId& id, LoneGroup group) {
  std::lock_guard guard(lock);
  groups[key_of(id)] = std::move(group);
}

std::vector<int> take_expected_part() {
  std::lock_guard guard(lock);
  if (expected_parts.empty()) return {};
  std::vector<int> part = std::move(expected_parts.front());
  expected_parts.pop_front();
  return part;
}

Wait::Wait(int rank) : rank_(rank) { std::ofstream(wait_file(own_rank())) << rank; }

Wait::~Wait() { std::remove(wait_file(own_rank()).c_str()); }

bool Wait::is_vain() {
  const auto now = std::chrono::steady_clock::now();
  if (!waits_for_itself(rank_)) last_without_circle_ = now;
  return now - last_without_circle_ > std::chrono::seconds(5);
}

void tell_stages(const std::vector<int>& ranks) {
  if (std::getenv(variables::kRankSummoned)) return;
  std::ofstream file(lone_file("stages"), std::ios::app);
  for (const int rank : ranks) file << rank << ' ';
  file << '\n';
}

bool has_ended(int rank) {
  const pid_t pid = process_of(rank);
  return pid == 0 || (pid > 0 && !oomdiag_device_is_alive(pid));
}

bool summon(int rank) {
  if (process_of(rank) != 0) return true;
  return start_rank(rank, rank_file(rank), lone_file("output-" + std::to_string(rank)));
}

}  // namespace oomdiag

void oomdiag_nccl_tell_group(const char* id, const char* canonical, int count, const int* ranks) {
  ncclUniqueId known;
  oomdiag::LoneGroup group;
  std::memcpy(known.internal, id, sizeof known.internal);
  std::memcpy(group.id.internal, canonical, sizeof group.id.internal);
  group.ranks.assign(ranks, ranks + count);
  oomdiag::tell_lone_group(known, std::move(group));
}

void oomdiag_nccl_expect_part(int count, const int* ranks) {
  std::lock_guard guard(oomdiag::lock);
  oomdiag::expected_parts.emplace_back(ranks, ranks + count);
}

int oomdiag_nccl_summon(int rank) { return oomdiag::summon(rank) ? 1 : 0; }
int oomdiag_nccl_has_ended(int rank) { return oomdiag::has_ended(rank) ? 1 : 0; }

namespace {

thread_local std::unique_ptr<oomdiag::Wait> wait_of_python;

}  // namespace

void oomdiag_nccl_wait_for(int rank) {
  wait_of_python.reset();
  if (rank >= 0) wait_of_python = std::make_unique<oomdiag::Wait>(rank);
}
int oomdiag_nccl_wait_is_vain() { return wait_of_python && wait_of_python->is_vain() ? 1 : 0; }
