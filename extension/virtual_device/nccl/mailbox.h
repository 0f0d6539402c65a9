#pragma once

#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "profiler/trace/shared_file.h"

// What ranks really send each other: contents that the host wrote, which is what objects, counts and shapes are.
//
// The ranks of a communicator share a file (profiler/trace/shared_file.h, unique_id.h). Each has a part of it that it alone writes: how many
// messages it has sent on each channel, the latest of those whose contents are known, and a ring with their bytes. A
// message of unknown contents is only counted. Writers never block: a reader that falls a whole ring behind loses the
// message and uses its own rank's data instead, as all do where no file can be shared.

namespace oomdiag {

inline constexpr size_t kMaxMessageBytes = 4 << 20;

/// Where a message is found: the `number`th that `sender` sent on `channel`. Channel 0 is of collectives, 1 + rank of what is
/// sent to that rank.
struct MessageId {
  int sender = 0;
  int channel = 0;
  uint64_t number = 0;
};

/// This rank's end of the file of a communicator. Made before, and destroyed after, any exchange.
class Mailbox {
 public:
  /// `ranks`: of its members in the job, of a single rank (single_rank/job.h).
  Mailbox(const ncclUniqueId& id, int count, int rank, std::vector<int> ranks = {});
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  /// Announces to the others that nothing more comes; the last to leave takes the file away.
  void leave();

  /// Sends the next message of a channel. No bytes: its contents are not known.
  void send(int channel, const std::vector<char>& bytes);

  /// The number of the next message of a channel.
  uint64_t next(int channel) const { return sent_[static_cast<size_t>(channel)]; }

  /// What others need to read: it may outlive the mailbox.
  struct Reader {
    Reader(const std::string& path, int rank_count, std::vector<int> ranks_of_job);

    SharedFile file;
    int count;
    std::vector<int> ranks;              ///< of the job, of a single rank
    std::atomic<bool> is_alone = false;  ///< a rank did not answer; no other is waited for any more

    /// Waits for the message and copies `bytes` from `offset` of it. False if there is nothing of it to be known.
    bool read(const MessageId& id, size_t offset, void* to, size_t bytes);
  };
  const std::shared_ptr<Reader>& reader() const { return reader_; }

 private:
  ncclUniqueId id_;
  std::shared_ptr<Reader> reader_;
  int rank_;
  int64_t pid_;
  std::vector<uint64_t> sent_;  ///< by channel
  uint64_t known_ = 0;          ///< messages with contents
  uint64_t ring_bytes_ = 0;     ///< written so far, over and over
};

}  // namespace oomdiag
