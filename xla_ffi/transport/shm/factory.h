// Shared memory between two processes of one host.
#ifndef XLA_FFI_TRANSPORT_SHM_FACTORY_H_
#define XLA_FFI_TRANSPORT_SHM_FACTORY_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "xla_ffi/common/fd.h"
#include "xla_ffi/common/status.h"
#include "xla_ffi/device/space.h"
#include "xla_ffi/transport/transport.h"

namespace hetccl::transport::shm {

// Slots small enough that the two copies of a 1 MB message overlap, and enough of them that one
// side may lose its core for a moment: with half as many, 16 MB took 1.4 times as long on a busy
// two-core machine; twice as many gained little and leave the second-level cache.
inline constexpr uint32_t kDefaultSlotBytes = 128 * 1024;
inline constexpr uint32_t kDefaultSlots = 16;

// For pairs with a GPU, whose DMA engines want large pieces: 4 MB copies reach 98 % of the link's
// rate, 1 MB ones 80 %. Enough of them that neither direction waits for the host in between.
inline constexpr uint32_t kGpuSlotBytes = 4 << 20;
inline constexpr uint32_t kGpuSlots = 8;

// Makes the memory of one channel: a sealed memfd. The sender's side makes it and passes the
// descriptor to the receiver's side.
Status MakeSegment(uint32_t slot_bytes, uint32_t slots, UniqueFd* out);

// Both take {stream socket to the peer, the segment's memfd}. The socket carries doorbells, the
// goodbye, and shows the peer's end. The descriptors are closed with the object, and at once if
// this fails. Payloads lie in `space`, whose copiers fill and empty the slots.
Status MakeSender(std::vector<UniqueFd> fds, device::Space& space, std::unique_ptr<Sender>* out);
Status MakeReceiver(std::vector<UniqueFd> fds, device::Space& space,
                    std::unique_ptr<Receiver>* out);

}  // namespace hetccl::transport::shm

#endif  // XLA_FFI_TRANSPORT_SHM_FACTORY_H_
