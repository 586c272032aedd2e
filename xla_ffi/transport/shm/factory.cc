#include "xla_ffi/transport/shm/factory.h"

#include <cerrno>
#include <utility>

#include "xla_ffi/transport/shm/receiver.h"
#include "xla_ffi/transport/shm/segment.h"
#include "xla_ffi/transport/shm/sender.h"

namespace hetccl::transport::shm {
namespace {

template <typename Half, typename Interface>
Status Make(std::vector<UniqueFd> fds, device::Space& space, std::unique_ptr<Interface>* out) {
  if (fds.size() != 2) {
    return InternalError("a shared memory channel needs a stream socket and a memfd, got " +
                         std::to_string(fds.size()) + " descriptors");
  }
  if (!SetNonBlocking(fds[0].get())) {
    return InternalError(ErrnoMessage("a shared memory channel's socket", errno));
  }
  auto half = std::make_unique<Half>(std::move(fds[0]));
  if (Status status = half->Map(fds[1], space); !status.ok()) return status;
  *out = std::move(half);
  return Status();
}

}  // namespace

Status MakeSegment(uint32_t slot_bytes, uint32_t slots, UniqueFd* out) {
  return Segment::Create(slot_bytes, slots, out);
}

Status MakeSender(std::vector<UniqueFd> fds, device::Space& space, std::unique_ptr<Sender>* out) {
  return Make<ShmSender>(std::move(fds), space, out);
}

Status MakeReceiver(std::vector<UniqueFd> fds, device::Space& space,
                    std::unique_ptr<Receiver>* out) {
  return Make<ShmReceiver>(std::move(fds), space, out);
}

}  // namespace hetccl::transport::shm
