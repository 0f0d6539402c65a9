#include "extension/virtual_device/nccl/transfer.h"

#include <cstring>
#include <memory>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/nccl/communicator.h"
#include "extension/virtual_device/nccl/mailbox.h"
#include "extension/virtual_device/nccl/single_rank/job.h"

namespace oomdiag {
namespace {

/// What comes from another rank, and what is taken in its place where that is not known: what this rank has itself.
struct Delivery {
  std::shared_ptr<Mailbox::Reader> reader;
  MessageId id;
  size_t offset = 0;
  size_t bytes = 0;
  std::vector<char> own{};
};

bool fetch(void* context, void* into) {
  const Delivery& delivery = *static_cast<Delivery*>(context);
  if (delivery.reader->read(delivery.id, delivery.offset, into, delivery.bytes)) return true;
  if (delivery.own.size() == delivery.bytes) std::memcpy(into, delivery.own.data(), delivery.bytes);
  return delivery.own.size() == delivery.bytes;
}

thread_local bool is_handing_over = false;

/// Whether nobody needs to be waited for: there is nobody, or one that is like this rank.
bool is_known_at_once(const ncclComm& comm, const Incoming& incoming) {
  if (!comm.mailbox || incoming.bytes > kMaxMessageBytes) return true;
  return is_single_rank() && (incoming.own || !incoming.is_asked_for);
}

}  // namespace

size_t element_bytes(ncclDataType_t type) {
  switch (static_cast<int>(type)) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 4;
  }
}

void hand_objects_over(bool does) noexcept { is_handing_over = does; }

bool hands_objects_over() noexcept { return is_handing_over; }

bool may_be_object(ncclDataType_t type) {
  const int number = static_cast<int>(type);
  return number == ncclInt8 || number == ncclUint8 || number == ncclInt32 || number == ncclInt64;
}

ncclResult_t submit(cudaStream_t stream) {
  return oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_KERNEL) ? ncclUnhandledCudaError : ncclSuccess;
}

std::vector<char> known_bytes(const void* from, size_t bytes) {
  if (bytes == 0 || bytes > kMaxMessageBytes) return {};
  std::vector<char> found(bytes);
  if (!oomdiag_device_peek(found.data(), from, bytes)) found.clear();
  return found;
}

void receive(const ncclComm& comm, void* to, const Incoming& incoming) {
  if (is_known_at_once(comm, incoming)) {
    if (incoming.own) {
      oomdiag_device_copy(to, incoming.own, incoming.bytes);
    } else {
      oomdiag_device_forget(to, incoming.bytes);
    }
    return;
  }
  auto delivery = std::make_unique<Delivery>(Delivery{
      .reader = comm.mailbox->reader(), .id = incoming.id, .offset = incoming.offset, .bytes = incoming.bytes});
  if (incoming.own) delivery->own = known_bytes(incoming.own, incoming.bytes);
  const auto release = [](void* context) { delete static_cast<Delivery*>(context); };
  oomdiag_device_promise(to, incoming.bytes, fetch, release, delivery.release());
}

}  // namespace oomdiag
