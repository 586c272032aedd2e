// What a failed work completion means, for people.
#ifndef XLA_FFI_TRANSPORT_RDMA_COMPLETION_ERROR_H_
#define XLA_FFI_TRANSPORT_RDMA_COMPLETION_ERROR_H_

#include <cstdint>
#include <string>

#include "xla_ffi/common/status.h"

namespace hetccl::transport::rdma {

// An error for the completion status `wc_status` (not 0), on `where` ("rdma rxe0 port 1"). Its kind
// is kPeerLost where the peer or the way to it is gone, kCorrupt where one side broke the protocol,
// kInternal else. The caller puts the peer's name in front.
Status CompletionError(int wc_status, uint32_t vendor_error, const std::string& where);

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_COMPLETION_ERROR_H_
