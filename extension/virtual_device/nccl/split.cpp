// ncclCommSplit is the one call whose answer depends on what the other ranks said: how many chose the same color. Each
// rank writes its row into a file that is named after the communicator, and reads the others' when all are there. The
// last to read takes the file away. In a group one thread may speak for several ranks, so that rows are read when it ends, as
// nccl.h has new communicators ready then.

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/nccl/communicator.h"
#include "extension/virtual_device/nccl/forward.h"
#include "extension/virtual_device/nccl/group.h"
#include "extension/virtual_device/nccl/single_rank/job.h"
#include "extension/virtual_device/nccl/single_rank/members.h"
#include "extension/virtual_device/nccl/unique_id.h"
#include "profiler/trace/shared_file.h"

namespace oomdiag {
namespace {

constexpr auto kSplitTimeout = std::chrono::seconds(60);

struct Row {
  int is_there;
  int color;
  int key;
  int has_read;
};

uint64_t place_of_row(int rank) { return static_cast<uint64_t>(rank) * sizeof(Row); }

/// All rows; empty until each `is_ready`.
template <typename Predicate>
std::vector<Row> read_rows(SharedFile& file, int count, Predicate is_ready) {
  std::vector<Row> rows(static_cast<size_t>(count));
  if (!file.load(0, rows.data(), place_of_row(count))) return {};
  for (const Row& row : rows) {
    if (!is_ready(row)) return {};
  }
  return rows;
}

std::vector<Row> wait_for_rows(SharedFile& file, int count) {
  const auto deadline = std::chrono::steady_clock::now() + kSplitTimeout;
  while (std::chrono::steady_clock::now() < deadline) {
    const auto rows = read_rows(file, count, [](const Row& row) { return row.is_there != 0; });
    if (!rows.empty()) return rows;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return {};
}

/// How a communicator was split: `count` ranks chose this rank's color, and this rank is `rank` among them.
struct SplitAnswer {
  int count = 0;
  int rank = 0;
};

/// Parts are ordered by key, then by rank in the whole (nccl.h).
SplitAnswer find_place(const std::vector<Row>& rows, int own) {
  SplitAnswer answer;
  const Row& mine = rows[static_cast<size_t>(own)];
  for (int rank = 0; rank < static_cast<int>(rows.size()); ++rank) {
    const Row& row = rows[static_cast<size_t>(rank)];
    if (row.color != mine.color) continue;
    ++answer.count;
    if (row.key < mine.key || (row.key == mine.key && rank < own)) ++answer.rank;
  }
  return answer;
}

/// What a rank chose, and where its part is to go.
struct Split {
  ncclComm_t parent = nullptr;
  int number = 0;  ///< among the parent's splits
  int color = 0;
  int key = 0;
  ncclComm_t* comm = nullptr;
  std::optional<ncclConfig_t> config{};

  std::unique_ptr<SharedFile> file{};  ///< of the rows

  const ncclConfig_t* settings() const { return config ? &*config : nullptr; }
};
/// Of this thread's group. Leaked: a group may end while thread_local objects are destroyed (fork_and_exit.h).
std::vector<Split>& waiting() {
  static thread_local auto& splits = *new std::vector<Split>;
  return splits;
}

bool write_row(const Split& split, bool has_read) {
  const Row own{.is_there = 1, .color = split.color, .key = split.key, .has_read = has_read};
  return split.file->store(place_of_row(split.parent->rank), &own, sizeof own);
}

/// Announces to the other ranks of the parent what this one chose.
void write_choice(Split& split) {
  const std::string name = shared_file(split.parent->id, std::to_string(split.number));
  split.file =
      std::make_unique<SharedFile>(name, place_of_row(split.parent->count), SharedFile::Opening::create_or_join);
  if (*split.file) write_row(split, false);
}

/// Waits for what the others chose. Nothing if they do not answer.
std::optional<SplitAnswer> read_choices(const Split& split) {
  SharedFile& file = *split.file;
  if (!file) return std::nullopt;
  const auto rows = wait_for_rows(file, split.parent->count);
  const bool is_written = write_row(split, true);
  const auto all_read = read_rows(file, split.parent->count, [](const Row& row) { return row.has_read != 0; });
  if (!all_read.empty() || !is_written || rows.empty()) file.remove();
  if (rows.empty()) return std::nullopt;
  return find_place(rows, split.parent->rank);
}

/// Makes the part that a single rank was registered for (members.h). The others are not there to be asked.
ncclResult_t split_single_rank(const Split& split) {
  const ncclComm& parent = *split.parent;
  std::vector<int> part = take_expected_part();
  if (part.empty()) part = parent.ranks;
  const int own = parent.ranks[static_cast<size_t>(parent.rank)];
  const auto place = std::find(part.begin(), part.end(), own);
  if (place == part.end()) return ncclInvalidUsage;
  const int rank = static_cast<int>(place - part.begin()), count = static_cast<int>(part.size());
  const ncclUniqueId id = derive_id(parent.id, split.number, split.color);
  register_members(id, {.id = id, .ranks = std::move(part)});
  return make_communicator(split.comm, count, rank, id, split.settings());
}

/// Makes the part, on its parent's device.
ncclResult_t finish_split(const Split& split) {
  const ncclComm& parent = *split.parent;
  const auto answer = read_choices(split);
  if (!answer) oomdiag_device_note("estimate", "ncclCommSplit: the part is taken to be as large as the whole");
  if (split.color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(parent.device);
  const auto [count, rank] = answer.value_or(SplitAnswer{.count = parent.count, .rank = parent.rank});
  const ncclUniqueId id = derive_id(parent.id, split.number, split.color);
  const ncclResult_t result = make_communicator(split.comm, count, rank, id, split.settings());
  if (result == ncclSuccess) (*split.comm)->is_count_guessed = !answer;
  cudaSetDevice(before);
  return result;
}

/// Makes the parts that this thread's splits wait for since its group began: all its ranks have said what they chose.
ncclResult_t finish_splits() {
  ncclResult_t result = ncclSuccess;
  for (const Split& split : std::exchange(waiting(), {})) {
    if (const ncclResult_t error = finish_split(split)) result = error;
  }
  return result;
}

}  // namespace

ncclResult_t split_communicator(ncclComm_t parent, int color, int key, ncclComm_t* comm, const ncclConfig_t* config) {
  *comm = nullptr;
  if (const ncclResult_t error = check(parent)) return error;
  Split split{.parent = parent, .number = ++parent->splits, .color = color, .key = key, .comm = comm};
  if (config) split.config = *config;
  if (is_single_rank()) return color == NCCL_SPLIT_NOCOLOR ? ncclSuccess : split_single_rank(split);
  write_choice(split);
  if (!is_in_group()) return finish_split(split);
  waiting().push_back(std::move(split));
  at_group_end(GroupTask::splits, finish_splits);
  return ncclSuccess;
}

}  // namespace oomdiag
