// TCP (or any other stream sockets): the transport that works everywhere.
#ifndef XLA_FFI_TRANSPORT_TCP_FACTORY_H_
#define XLA_FFI_TRANSPORT_TCP_FACTORY_H_

#include <memory>
#include <vector>

#include "xla_ffi/common/fd.h"
#include "xla_ffi/common/status.h"
#include "xla_ffi/device/space.h"
#include "xla_ffi/transport/transport.h"
#include "xla_ffi/transport/window.h"

namespace hetccl::transport::tcp {

// Both take connected, authenticated stream sockets: at least one, the same number and order on
// both sides. Large payloads are striped over all of them, everything else uses the first.
// The sockets are closed with the object, and at once if this fails. Payloads lie in `space`; where
// host code cannot touch them they pass through slots, `staging` for each socket. With `checksum`,
// which must be the same on both sides, a bit that changes on the way is an error of the receiver.
Status MakeSender(std::vector<UniqueFd> sockets, device::Space& space, const Staging& staging,
                  bool checksum, std::unique_ptr<Sender>* out);
Status MakeReceiver(std::vector<UniqueFd> sockets, device::Space& space, const Staging& staging,
                    bool checksum, std::unique_ptr<Receiver>* out);

}  // namespace hetccl::transport::tcp

#endif  // XLA_FFI_TRANSPORT_TCP_FACTORY_H_
