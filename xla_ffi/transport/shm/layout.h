// How a message lies in the slots.
#ifndef XLA_FFI_TRANSPORT_SHM_LAYOUT_H_
#define XLA_FFI_TRANSPORT_SHM_LAYOUT_H_

#include <cstddef>

#include "xla_ffi/transport/message.h"

namespace hetccl::transport::shm {

// In a message's first slot the payload begins here, aligned like the slots themselves.
inline constexpr size_t kPayloadOffset = 256;
static_assert(sizeof(WireHeader) <= kPayloadOffset);

}  // namespace hetccl::transport::shm

#endif  // XLA_FFI_TRANSPORT_SHM_LAYOUT_H_
