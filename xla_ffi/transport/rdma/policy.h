// Which messages are moved without a copy.
#ifndef XLA_FFI_TRANSPORT_RDMA_POLICY_H_
#define XLA_FFI_TRANSPORT_RDMA_POLICY_H_

#include <cstddef>
#include <vector>

#include "xla_ffi/transport/span_cursor.h"

namespace hetccl::transport::rdma {

// From this size on a message's memory is registered for it and moved without a copy: registering,
// at both ends, and the way of the grant back cost tens of microseconds, as much as two copies of
// so many bytes.
inline constexpr size_t kDirectFrom = 128 << 10;
// Each span is a registration of its own, so they should not be much smaller.
inline constexpr size_t kDirectSpan = 32 << 10;
// So much is registered at once: the first bytes move while the rest is registered.
inline constexpr size_t kRegisterBytes = 16 << 20;
// Of one write: enough for full speed, and little enough to leave the NIC to other channels.
inline constexpr size_t kWriteBytes = 1 << 20;
// Of one grant. Only its last write wakes the two sides.
inline constexpr size_t kGrantBytes = 4 << 20;
// Slots of a side that moves everything large without them.
inline constexpr size_t kHostSlotBytes = 256 << 10;
static_assert(kHostSlotBytes >= kDirectFrom + 4096);

template <typename SpanType>
bool WorthRegistering(const std::vector<SpanType>& payload) {
  const size_t total = TotalSize(payload);
  return total >= kDirectFrom && total / payload.size() >= kDirectSpan;
}

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_POLICY_H_
