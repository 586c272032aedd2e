// RDMA between two NICs, by InfiniBand or RoCE.
#ifndef XLA_FFI_TRANSPORT_RDMA_FACTORY_H_
#define XLA_FFI_TRANSPORT_RDMA_FACTORY_H_

#include <memory>
#include <string>
#include <vector>

#include "xla_ffi/common/fd.h"
#include "xla_ffi/common/status.h"
#include "xla_ffi/device/space.h"
#include "xla_ffi/transport/rdma/devices.h"
#include "xla_ffi/transport/rdma/options.h"
#include "xla_ffi/transport/transport.h"
#include "xla_ffi/transport/window.h"

namespace hetccl::transport::rdma {

// Both take one connected, authenticated stream socket, connect a queue pair with the peer's by it
// and try it out both ways. That waits, for seconds at most: not for a proxy thread. An error names
// device, port and reason, also one of the peer's; then neither side has a channel. The socket
// carries the goodbye from then on and shows the peer's end; it is closed with the object, and at
// once if this fails. Payloads lie in `space`; the slots are as `staging` says, but not larger than
// is useful where host code may touch the payloads.
Status MakeSender(std::vector<UniqueFd> sockets, device::Space& space, const Staging& staging,
                  const Options& options, std::unique_ptr<Sender>* out);
Status MakeReceiver(std::vector<UniqueFd> sockets, device::Space& space, const Staging& staging,
                    const Options& options, std::unique_ptr<Receiver>* out);

// Why registrations of buffers are not kept on the port of these options, whatever they want; empty
// if they would be. Tries it unless a channel has: waits, for seconds at most.
std::string WhyNotOnDemand(const Options& options);

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_FACTORY_H_
