#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

// One rank of a job whose others are not there (oomdiag run --world-size 64 --rank 5).
//
// Ranks that are not there are taken to be like this one: what it has, they have. That answers counts, checks of shapes and
// most collectives. What only another rank makes (an object that it broadcasts or sends) cannot be answered so. When the
// host looks at such bytes, the rank that makes them is spawned: the same command is started as that rank, its messages go
// through the mailbox as in a whole job, and it ends when the rank that is diagnosed does (spawn_peer.h).
//
// The processes of the job share a folder (OOMDIAG_RANK_JOB) with a file for each fact:
//   rank-N     the process id of rank N, as soon as it runs; empty while it is being started
//   waits-N    the rank that rank N waits for
//   output-N   what a spawned rank prints
//   stages     lines of ranks that are the stages of a pipeline
//   …-mail     the messages of a communicator (mailbox.h)

namespace oomdiag {

/// Whether this process is a rank of such a job.
bool is_single_rank() noexcept;

/// The path of a file of the job.
std::string job_file(const std::string& name);
std::string rank_file(int rank);
std::string output_file(int rank);

/// The process id of a rank; 0 = not there, -1 = being started.
pid_t process_of(int rank);

/// Whether a rank that was spawned has ended.
bool has_ended(int rank);

/// Says that these ranks are the stages of a pipeline, for who runs one rank of each kind. Of the diagnosed rank only.
void write_stages(const std::vector<int>& ranks);

/// This rank waits for another, as the others can see while this lives.
class PeerWait {
 public:
  explicit PeerWait(int rank);
  ~PeerWait();
  PeerWait(const PeerWait&) = delete;
  PeerWait& operator=(const PeerWait&) = delete;

  /// Whether ranks have waited for each other in a circle for five seconds: no message is on its way that long.
  bool is_deadlocked();

 private:
  int rank_;
  std::chrono::steady_clock::time_point last_without_circle_ = std::chrono::steady_clock::now();
};

}  // namespace oomdiag
