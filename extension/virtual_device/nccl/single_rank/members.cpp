#include "extension/virtual_device/nccl/single_rank/members.h"

#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

#include "extension/virtual_device/driver/locks.h"

namespace oomdiag {
namespace {

using Key = std::array<char, NCCL_UNIQUE_ID_BYTES>;

Key key_of(const ncclUniqueId& id) {
  Key key;
  std::memcpy(key.data(), id.internal, key.size());
  return key;
}

// Never destroyed: communicators end in static destructors.
auto& members_lock = *new LibraryLock;
auto& known_members = *new std::map<Key, Members>;
auto& expected_parts = *new std::deque<std::vector<int>>;

}  // namespace

Members find_members(const ncclUniqueId& id, int count) {
  std::lock_guard guard(members_lock);
  const auto found = known_members.find(key_of(id));
  if (found != known_members.end() && found->second.ranks.size() == static_cast<size_t>(count)) return found->second;
  Members members{.id = id, .ranks = std::vector<int>(static_cast<size_t>(count))};
  std::iota(members.ranks.begin(), members.ranks.end(), 0);
  return members;
}

void register_members(const ncclUniqueId& id, Members members) {
  std::lock_guard guard(members_lock);
  known_members[key_of(id)] = std::move(members);
}

std::vector<int> take_expected_part() {
  std::lock_guard guard(members_lock);
  if (expected_parts.empty()) return {};
  std::vector<int> part = std::move(expected_parts.front());
  expected_parts.pop_front();
  return part;
}

void expect_part(std::vector<int> ranks) {
  std::lock_guard guard(members_lock);
  expected_parts.push_back(std::move(ranks));
}

}  // namespace oomdiag
