#include "extension/virtual_device/nccl/mailbox.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "extension/virtual_device/driver/locks.h"
#include "extension/virtual_device/nccl/lone.h"

namespace oomdiag {
namespace {

constexpr auto kPatience = std::chrono::seconds(60);
constexpr auto kPatienceOfLone = std::chrono::minutes(30);  // a rank that was summoned begins from the beginning
constexpr size_t kSlots = 256;
constexpr size_t kRingBytes = 4 * kMostMessageBytes;

// A rank's part: this, then how much it sent on each channel, then its ring.
struct Slot {
  int64_t channel;
  uint64_t number;
  uint64_t begin;  ///< in the ring, as if it never came round
  uint64_t bytes;
};
struct Head {
  int64_t pid;  ///< 0: not there yet
  int64_t has_left;
  uint64_t ring_bytes;
  std::array<Slot, kSlots> slots;
};

/// Open while it lives: programs close descriptors that they do not know, and then use their numbers.
class File {
 public:
  explicit File(const std::string& name) : file_(open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {}
  ~File() {
    if (file_ >= 0) close(file_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  /// What was never written reads as zeros.
  void read(size_t at, void* to, size_t bytes) const {
    char* place = static_cast<char*>(to);
    std::fill(place, place + bytes, char{0});
    [[maybe_unused]] const ssize_t got = pread(file_, to, bytes, static_cast<off_t>(at));
  }
  void write(size_t at, const void* from, size_t bytes) const {
    [[maybe_unused]] const ssize_t put = pwrite(file_, from, bytes, static_cast<off_t>(at));
  }

 private:
  int file_;
};

size_t part_bytes(int count) { return sizeof(Head) + sizeof(uint64_t) * (1 + static_cast<size_t>(count)) + kRingBytes; }
size_t place_of(int rank, int count) { return static_cast<size_t>(rank) * part_bytes(count); }
size_t place_of_channel(const MessageId& id, int count) {
  return place_of(id.sender, count) + sizeof(Head) + sizeof(uint64_t) * static_cast<size_t>(id.channel);
}
size_t place_of_ring(int rank, int count) { return place_of(rank, count) + part_bytes(count) - kRingBytes; }

/// The two parts of a range of the ring, of which the second may be empty: calls use(place in the file, offset, bytes).
template <typename Use>
void for_ring(int rank, int count, uint64_t begin, size_t bytes, Use use) {
  const size_t at = begin % kRingBytes;
  const size_t first = std::min(bytes, kRingBytes - at);
  use(place_of_ring(rank, count) + at, size_t{0}, first);
  if (bytes > first) use(place_of_ring(rank, count), first, bytes - first);
}

bool is_gone(const Head& head) {
  return head.has_left || (head.pid != 0 && kill(static_cast<pid_t>(head.pid), 0) != 0 && errno == ESRCH);
}

/// The same of a rank that may not have come yet: one that was summoned has its own process id elsewhere.
bool is_gone(const Head& head, int rank_of_job) {
  return is_lone() ? head.has_left || has_ended(rank_of_job) : is_gone(head);
}

/// Whether the message was sent, waiting for it as long as its sender lives. In a job of lone ranks the sender may have to
/// be started.
bool wait_for(const File& file, const MessageId& id, const Mailbox::Reader& reader) {
  const int count = reader.count;
  const int sender = is_lone() ? reader.ranks[static_cast<size_t>(id.sender)] : id.sender;
  std::optional<Wait> wait;
  if (is_lone()) {
    if (!summon(sender)) return false;
    wait.emplace(sender);
  }
  const auto deadline = std::chrono::steady_clock::now() + (is_lone() ? kPatienceOfLone : kPatience);
  do {
    Head head;
    file.read(place_of(id.sender, count), &head, sizeof head);
    uint64_t sent = 0;
    file.read(place_of_channel(id, count), &sent, sizeof sent);
    if (sent > id.number) return true;
    if (is_gone(head, sender) || (wait && wait->is_vain())) return false;
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

std::string shared_file(const ncclUniqueId& id, const std::string& what) {
  const char* folder = std::getenv("TMPDIR");
  std::string name = std::string(folder && *folder ? folder : "/tmp") + "/oomdiag-nccl-";
  if (is_lone()) name = lone_file("nccl-");
  for (int i = 0; i < 16; ++i) {
    const auto byte = static_cast<unsigned char>(id.internal[i] ^ id.internal[112 + i]);
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  return name + "-" + what;
}

Mailbox::Mailbox(const ncclUniqueId& id, int count, int rank, std::vector<int> ranks)
    : reader_(std::make_shared<Reader>()), rank_(rank), pid_(getpid()), sent_(static_cast<size_t>(count) + 1) {
  reader_->file = shared_file(id, "mail");
  reader_->count = count;
  reader_->ranks = std::move(ranks);
  File(reader_->file).write(place_of(rank, count) + offsetof(Head, pid), &pid_, sizeof pid_);
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
  if (getpid() != pid_) return;  // a forked child has no part in it
  const int count = reader_->count;
  const File file(reader_->file);
  const int64_t has_left = 1;
  file.write(place_of(rank_, count) + offsetof(Head, has_left), &has_left, sizeof has_left);
  if (is_lone()) return;  // the file goes with the job's folder
  for (int rank = 0; rank < count; ++rank) {
    Head head;
    file.read(place_of(rank, count), &head, sizeof head);
    if (!is_gone(head)) return;
  }
  unlink(reader_->file.c_str());
}

void Mailbox::send(int channel, const std::vector<char>& bytes) {
  const int count = reader_->count;
  const MessageId id{.sender = rank_, .channel = channel, .number = sent_[static_cast<size_t>(channel)]++};
  const File file(reader_->file);
  if (!bytes.empty()) {
    const Slot slot{.channel = channel, .number = id.number, .begin = ring_bytes_, .bytes = bytes.size()};
    ring_bytes_ += bytes.size();
    // Told before it is overwritten: a reader looks at it last.
    file.write(place_of(rank_, count) + offsetof(Head, ring_bytes), &ring_bytes_, sizeof ring_bytes_);
    for_ring(rank_, count, slot.begin, bytes.size(),
             [&](size_t place, size_t offset, size_t part) { file.write(place, bytes.data() + offset, part); });
    file.write(place_of(rank_, count) + offsetof(Head, slots) + sizeof slot * (known_++ % kSlots), &slot, sizeof slot);
  }
  const uint64_t sent = id.number + 1;
  file.write(place_of_channel(id, count), &sent, sizeof sent);
}

bool Mailbox::Reader::read(const MessageId& id, size_t offset, void* to, size_t bytes) {
  if (is_alone) return false;
  const File opened(file);
  if (!wait_for(opened, id, *this)) {
    is_alone = true;
    return false;
  }
  Head head;
  opened.read(place_of(id.sender, count), &head, sizeof head);
  const auto slot = std::find_if(head.slots.begin(), head.slots.end(), [&](const Slot& one) {
    return one.bytes != 0 && one.channel == id.channel && one.number == id.number;
  });
  if (slot == head.slots.end() || offset + bytes > slot->bytes) return false;
  for_ring(id.sender, count, slot->begin + offset, bytes, [&](size_t place, size_t part_offset, size_t part) {
    opened.read(place, static_cast<char*>(to) + part_offset, part);
  });
  uint64_t ring_bytes = 0;
  opened.read(place_of(id.sender, count) + offsetof(Head, ring_bytes), &ring_bytes, sizeof ring_bytes);
  return ring_bytes - slot->begin <= kRingBytes;
}

}  // namespace oomdiag
