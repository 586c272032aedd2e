// How a message lies in the slots.
#ifndef XLA_FFI_TRANSPORT_SHM_LAYOUT_H_
#define XLA_FFI_TRANSPORT_SHM_LAYOUT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "xla_ffi/transport/message.h"

namespace hetccl::transport::shm {

// In a message's first slot the payload begins here, aligned like the slots themselves.
inline constexpr size_t kPayloadOffset = 256;
static_assert(sizeof(WireHeader) <= kPayloadOffset);

// Large slots (those of a pair with a GPU) are filled partly at a message's ends: nothing is copied
// out of the first slot before it is full, and nothing into the last one's place while it is
// emptied, so both should be small. This much is worth a slot of its own.
inline constexpr size_t kLeastInSlot = 512 << 10;

// How many bytes, of the payload or in front of it, a slot of a message holds; both sides must
// agree. The first slots double, up to the slot's size; the last ones hold half of what is left.
//
// `number`: of the slot within the message. `left`: bytes that remain, with the offset in the slot.
inline size_t BytesInSlot(uint64_t number, size_t slot_bytes, size_t left) {
  const size_t rising = number < 16 ? kLeastInSlot << number : slot_bytes;
  const size_t falling = std::max(kLeastInSlot, (left / 2 + 255) / 256 * 256);
  return std::min({slot_bytes, left, rising, falling});
}

}  // namespace hetccl::transport::shm

#endif  // XLA_FFI_TRANSPORT_SHM_LAYOUT_H_
