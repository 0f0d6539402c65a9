#include "extension/virtual_device/nccl/mailbox.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/locks.h"
#include "extension/virtual_device/nccl/single_rank/job.h"
#include "extension/virtual_device/nccl/single_rank/spawn_peer.h"
#include "extension/virtual_device/nccl/unique_id.h"

namespace oomdiag {
namespace {

constexpr auto kTimeout = std::chrono::seconds(60);
constexpr auto kSpawnTimeout = std::chrono::minutes(30);  // a spawned rank begins from the beginning
constexpr size_t kSlots = 256;
constexpr size_t kRingBytes = 4 * kMaxMessageBytes;

// A rank's part: this, then how much it sent on each channel, then its ring.
struct Slot {
  int64_t channel;
  uint64_t number;
  uint64_t begin;  ///< in the ring, as if it never came round
  uint64_t bytes;

  bool operator==(const Slot&) const = default;
};
struct Head {
  int64_t pid;  ///< 0: not there yet
  int64_t has_left;
  uint64_t ring_bytes;
  std::array<Slot, kSlots> slots;
};

size_t part_bytes(int count) { return sizeof(Head) + sizeof(uint64_t) * (1 + static_cast<size_t>(count)) + kRingBytes; }
size_t place_of(int rank, int count) { return static_cast<size_t>(rank) * part_bytes(count); }
size_t place_of_slot(int rank, int count, size_t index) {
  return place_of(rank, count) + offsetof(Head, slots) + sizeof(Slot) * index;
}
size_t place_of_channel(const MessageId& id, int count) {
  return place_of(id.sender, count) + sizeof(Head) + sizeof(uint64_t) * static_cast<size_t>(id.channel);
}
size_t place_of_ring(int rank, int count) { return place_of(rank, count) + part_bytes(count) - kRingBytes; }

/// The two parts of a range of the ring, of which the second may be empty: calls use(place in the file, offset, bytes), which
/// returns whether it could.
template <typename Use>
bool for_ring(int rank, int count, uint64_t begin, size_t bytes, Use use) {
  const size_t at = begin % kRingBytes;
  const size_t first = std::min(bytes, kRingBytes - at);
  if (!use(place_of_ring(rank, count) + at, size_t{0}, first)) return false;
  return bytes == first || use(place_of_ring(rank, count), first, bytes - first);
}

bool is_gone(const Head& head) {
  return head.has_left || (head.pid != 0 && !oomdiag_device_is_alive(static_cast<int>(head.pid)));
}

/// The same of a rank that may not have come yet: a spawned one has its own process id elsewhere.
bool is_gone(const Head& head, int rank_of_job) {
  return is_single_rank() ? head.has_left || has_ended(rank_of_job) : is_gone(head);
}

/// Whether the message was sent, waiting for it as long as its sender lives. Of a single rank the sender may have to
/// be started.
bool wait_for(const MessageId& id, Mailbox::Reader& reader) {
  const int count = reader.count;
  const int sender = is_single_rank() ? reader.ranks[static_cast<size_t>(id.sender)] : id.sender;
  std::optional<PeerWait> wait;
  if (is_single_rank()) {
    if (!spawn_peer(sender)) return false;
    wait.emplace(sender);
  }
  const auto deadline = std::chrono::steady_clock::now() + (is_single_rank() ? kSpawnTimeout : kTimeout);
  do {
    Head head;
    uint64_t sent = 0;
    const bool is_read = reader.file.load(place_of(id.sender, count), &head, sizeof head) &&
                         reader.file.load(place_of_channel(id, count), &sent, sizeof sent);
    if (!is_read) return false;
    if (sent > id.number) return true;
    if (is_gone(head, sender) || (wait && wait->is_deadlocked())) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(wait ? 2000 : 200));
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

// Never destroyed: what follows runs in a static destructor.
auto& open_lock = *new LibraryLock;
auto& open_boxes = *new std::set<Mailbox*>;

/// Programs end without ncclCommDestroy.
[[gnu::destructor]] void leave_all() {
  for (Mailbox* box : open_boxes) box->leave();
}

}  // namespace

Mailbox::Reader::Reader(const std::string& path, int rank_count, std::vector<int> ranks_of_job)
    : file(path, part_bytes(rank_count) * static_cast<size_t>(rank_count), SharedFile::Opening::create_or_join),
      count(rank_count),
      ranks(std::move(ranks_of_job)),
      is_alone(!file) {
  if (is_alone) oomdiag_device_note("estimate", "what ranks send each other: they could not share a file");
}

Mailbox::Mailbox(const ncclUniqueId& id, int count, int rank, std::vector<int> ranks)
    : id_(id),
      reader_(std::make_shared<Reader>(shared_file(id, "mail"), count, std::move(ranks))),
      rank_(rank),
      pid_(getpid()),
      sent_(static_cast<size_t>(count) + 1) {
  if (reader_->file) reader_->file.store(place_of(rank, count) + offsetof(Head, pid), &pid_, sizeof pid_);
  std::lock_guard guard(open_lock);
  open_boxes.insert(this);
}

Mailbox::~Mailbox() {
  {
    std::lock_guard guard(open_lock);
    open_boxes.erase(this);
  }
  leave();
}

void Mailbox::leave() {
  SharedFile& file = reader_->file;
  if (getpid() != pid_ || !file) return;  // a forked child has no part in it
  const int count = reader_->count;
  const int64_t has_left = 1;
  file.store(place_of(rank_, count) + offsetof(Head, has_left), &has_left, sizeof has_left);
  if (is_single_rank()) return;  // the file goes with the job's folder
  for (int rank = 0; rank < count; ++rank) {
    Head head;
    if (!file.load(place_of(rank, count), &head, sizeof head) || !is_gone(head)) return;
  }
  file.remove();
  leave_shared_folder(id_);
}

void Mailbox::send(int channel, const std::vector<char>& bytes) {
  const int count = reader_->count;
  const MessageId id{.sender = rank_, .channel = channel, .number = sent_[static_cast<size_t>(channel)]++};
  SharedFile& file = reader_->file;
  if (!file) return;
  if (!bytes.empty()) {
    const Slot slot{.channel = channel, .number = id.number, .begin = ring_bytes_, .bytes = bytes.size()};
    ring_bytes_ += bytes.size();
    // Announced before it is overwritten: a reader looks at it last.
    const bool is_stored =
        file.store(place_of(rank_, count) + offsetof(Head, ring_bytes), &ring_bytes_, sizeof ring_bytes_) &&
        for_ring(rank_, count, slot.begin, bytes.size(), [&](size_t place, size_t offset, size_t part) {
          return file.store(place, bytes.data() + offset, part);
        });
    if (is_stored) file.store(place_of_slot(rank_, count, known_++ % kSlots), &slot, sizeof slot);
  }
  const uint64_t sent = id.number + 1;
  file.store(place_of_channel(id, count), &sent, sizeof sent);
}

bool Mailbox::Reader::read(const MessageId& id, size_t offset, void* to, size_t bytes) {
  if (is_alone) return false;
  if (!wait_for(id, *this)) {
    is_alone = true;
    return false;
  }
  Head head;
  if (!file.load(place_of(id.sender, count), &head, sizeof head)) return false;
  const auto found = std::find_if(head.slots.begin(), head.slots.end(), [&](const Slot& one) {
    return one.bytes != 0 && one.channel == id.channel && one.number == id.number;
  });
  if (found == head.slots.end() || offset + bytes > found->bytes) return false;
  const bool is_read =
      for_ring(id.sender, count, found->begin + offset, bytes, [&](size_t place, size_t part_offset, size_t part) {
        return file.load(place, static_cast<char*>(to) + part_offset, part);
      });
  Slot now;
  uint64_t ring_bytes = 0;
  const size_t index = static_cast<size_t>(found - head.slots.begin());
  return is_read && file.load(place_of_slot(id.sender, count, index), &now, sizeof now) && now == *found &&
         file.load(place_of(id.sender, count) + offsetof(Head, ring_bytes), &ring_bytes, sizeof ring_bytes) &&
         ring_bytes - found->begin <= kRingBytes;
}

}  // namespace oomdiag
