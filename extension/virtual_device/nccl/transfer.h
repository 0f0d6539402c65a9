#pragma once

#include "extension/virtual_device/nccl/communicator.h"
#include "extension/virtual_device/nccl/mailbox.h"

// What collectives and messages have in common: work on a stream, and contents that go from rank to rank.

namespace oomdiag {

size_t element_bytes(ncclDataType_t type);

ncclResult_t submit(cudaStream_t stream);

/// The contents of a small buffer as far as the host wrote all of it, else nothing.
std::vector<char> known_bytes(const void* from, size_t bytes);

/// What is to come, and what may be taken for it.
struct Incoming {
  MessageId id{};
  size_t offset = 0;  ///< in the message
  size_t bytes = 0;
  const void* own = nullptr;  ///< this rank's counterpart, if any
  bool is_asked_for = true;   ///< of a single rank: worth spawning its sender, should the host look at it
};

/// It comes to `to`: at once where it is known, else as a promise.
void receive(const ncclComm& comm, void* to, const Incoming& incoming);

/// What is no number of a model: objects are bytes, sizes and shapes are whole numbers.
bool may_be_object(ncclDataType_t type);

/// Whether this thread is in a call of PyTorch that hands objects over: what lies in the place of what is to come is no answer.
bool hands_objects_over() noexcept;
void hand_objects_over(bool does) noexcept;

}  // namespace oomdiag
