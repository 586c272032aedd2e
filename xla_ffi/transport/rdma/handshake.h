// How the two ends of a channel come together, over its stream socket; see wire.h.
#ifndef XLA_FFI_TRANSPORT_RDMA_HANDSHAKE_H_
#define XLA_FFI_TRANSPORT_RDMA_HANDSHAKE_H_

#include <string>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/common/status.h"
#include "xla_ffi/transport/rdma/options.h"
#include "xla_ffi/transport/rdma/queue_pair.h"
#include "xla_ffi/transport/rdma/wire.h"

namespace hetccl::transport::rdma {

// Waits for the peer at most this long in each of the steps behind the first, see
// Options::patience.
inline constexpr Duration kHandshakeBound = std::chrono::seconds(5);

// How long a probe may take: a packet that is lost is sent again only after the NIC's time-out, or
// up to four times that (NICs may round it up), and twice that leaves room for one more. At least
// kHandshakeBound, at most a minute. `timeout`: of Options.
Duration ProbeBound(int timeout);

// Connects the queue pair, whose receives are posted, and probes it both ways. `probe`: 8
// registered bytes that are written to the peer. Waits; not for a proxy thread. Either both sides
// succeed or both fail, unless the socket breaks behind the sender's last byte.
Status Handshake(int socket, const Options& options, QueuePair* queue_pair,
                 const EndpointRecord& mine, const void* probe, uint32_t probe_lkey,
                 EndpointRecord* theirs);

// Tells a peer that expects a record why there is none.
void Refuse(int socket, const Options& options, Role mine, const std::string& reason);

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_HANDSHAKE_H_
