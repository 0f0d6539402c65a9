#include "extension/virtual_device/nccl/single_rank/job.h"

#include <cstdio>
#include <fstream>

#include "extension/environment.h"
#include "extension/virtual_device/driver/device.h"

namespace oomdiag {
namespace {

const char* job_folder() noexcept {
  static const char* const folder = variables::text(variables::kRankJob);
  return folder;
}

int own_rank() { return static_cast<int>(variables::number("RANK", 0)); }

std::string wait_file(int rank) { return job_file("waits-" + std::to_string(rank)); }

/// Whether who waits for `rank` waits, by way of others, for itself.
bool waits_for_itself(int rank) {
  constexpr int kMaxCircle = 64;
  for (int i = 0; i < kMaxCircle; ++i) {
    std::ifstream file(wait_file(rank));
    if (!(file >> rank)) return false;
    if (rank == own_rank()) return true;
  }
  return false;
}

}  // namespace

bool is_single_rank() noexcept { return *job_folder() != '\0'; }

std::string job_file(const std::string& name) { return std::string(job_folder()) + "/" + name; }
std::string rank_file(int rank) { return job_file("rank-" + std::to_string(rank)); }
std::string output_file(int rank) { return job_file("output-" + std::to_string(rank)); }

pid_t process_of(int rank) {
  std::ifstream file(rank_file(rank));
  if (!file) return 0;
  pid_t pid = 0;
  return file >> pid ? pid : -1;
}

bool has_ended(int rank) {
  const pid_t pid = process_of(rank);
  return pid == 0 || (pid > 0 && !oomdiag_device_is_alive(pid));
}

void write_stages(const std::vector<int>& ranks) {
  if (variables::is_on(variables::kRankSummoned)) return;
  std::ofstream file(job_file("stages"), std::ios::app);
  for (const int rank : ranks) file << rank << ' ';
  file << '\n';
}

PeerWait::PeerWait(int rank) : rank_(rank) { std::ofstream(wait_file(own_rank())) << rank; }

PeerWait::~PeerWait() { std::remove(wait_file(own_rank()).c_str()); }

bool PeerWait::is_deadlocked() {
  const auto now = std::chrono::steady_clock::now();
  if (!waits_for_itself(rank_)) last_without_circle_ = now;
  return now - last_without_circle_ > std::chrono::seconds(5);
}

}  // namespace oomdiag
