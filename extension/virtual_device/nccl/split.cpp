// ncclCommSplit is the one call whose answer depends on what the other ranks said: how many chose the same color. Each
// rank writes its row into a file that is named after the communicator, and reads the others' when all are there. The
// last to read takes the file away.

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "extension/virtual_device/nccl/communicator.h"

namespace oomdiag {
namespace {

constexpr auto kPatienceOfSplit = std::chrono::seconds(60);

struct Row {
  int is_there;
  int color;
  int key;
  int has_read;
};

off_t place_of(int rank) { return static_cast<off_t>(rank) * static_cast<off_t>(sizeof(Row)); }

/// All rows; empty until each `is_ready`.
template <typename Predicate>
std::vector<Row> read_rows(int file, int count, Predicate is_ready) {
  std::vector<Row> rows(static_cast<size_t>(count));
  const size_t bytes = rows.size() * sizeof(Row);
  if (pread(file, rows.data(), bytes, 0) != static_cast<ssize_t>(bytes)) return {};
  for (const Row& row : rows) {
    if (!is_ready(row)) return {};
  }
  return rows;
}

std::vector<Row> wait_for_rows(int file, int count) {
  const auto deadline = std::chrono::steady_clock::now() + kPatienceOfSplit;
  while (std::chrono::steady_clock::now() < deadline) {
    const auto rows = read_rows(file, count, [](const Row& row) { return row.is_there != 0; });
    if (!rows.empty()) return rows;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return {};
}

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

}  // namespace

bool agree_on_split(const ncclComm& parent, int color, int key, SplitAnswer& answer) {
  const std::string name = shared_file(parent.id, std::to_string(parent.splits));
  const int file = open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return false;
  Row own{.is_there = 1, .color = color, .key = key, .has_read = 0};
  const bool is_written = pwrite(file, &own, sizeof own, place_of(parent.rank)) == sizeof own;
  const auto rows = is_written ? wait_for_rows(file, parent.count) : std::vector<Row>{};
  if (!rows.empty()) answer = find_place(rows, parent.rank);
  own.has_read = 1;
  const bool is_told = pwrite(file, &own, sizeof own, place_of(parent.rank)) == sizeof own;
  const auto all_read = read_rows(file, parent.count, [](const Row& row) { return row.has_read != 0; });
  if (!all_read.empty() || !is_told || rows.empty()) unlink(name.c_str());
  close(file);
  return !rows.empty();
}

}  // namespace oomdiag
