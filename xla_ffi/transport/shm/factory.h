// Shared memory between two processes of one host.
#ifndef XLA_FFI_TRANSPORT_SHM_FACTORY_H_
#define XLA_FFI_TRANSPORT_SHM_FACTORY_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "xla_ffi/common/fd.h"
#include "xla_ffi/common/status.h"
#include "xla_ffi/transport/transport.h"

namespace hetccl::transport::shm {

// Twice this much per channel stays in a core's second-level cache while it is copied.
inline constexpr uint32_t kDefaultSlotBytes = 128 * 1024;
inline constexpr uint32_t kDefaultSlots = 8;

// Makes the memory of one channel: a sealed memfd. The sender's side makes it and passes the
// descriptor to the receiver's side.
Status MakeSegment(uint32_t slot_bytes, uint32_t slots, UniqueFd* out);

// Both take {stream socket to the peer, the segment's memfd}. The socket carries doorbells, the
// goodbye, and shows the peer's end. The descriptors are closed with the object, and at once if
// this fails.
Status MakeSender(std::vector<UniqueFd> fds, std::unique_ptr<Sender>* out);
Status MakeReceiver(std::vector<UniqueFd> fds, std::unique_ptr<Receiver>* out);

}  // namespace hetccl::transport::shm

#endif  // XLA_FFI_TRANSPORT_SHM_FACTORY_H_
