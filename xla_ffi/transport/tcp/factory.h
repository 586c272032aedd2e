// TCP (or any other stream sockets): the transport that works everywhere.
#ifndef XLA_FFI_TRANSPORT_TCP_FACTORY_H_
#define XLA_FFI_TRANSPORT_TCP_FACTORY_H_

#include <memory>
#include <string>
#include <vector>

#include "xla_ffi/common/fd.h"
#include "xla_ffi/common/status.h"
#include "xla_ffi/device/space.h"
#include "xla_ffi/transport/tcp/options.h"
#include "xla_ffi/transport/transport.h"
#include "xla_ffi/transport/window.h"

namespace hetccl::transport::tcp {

// Both take connected, authenticated stream sockets: at least one, the same number and order on
// both sides. Large payloads are striped over all of them, everything else uses the first.
// The sockets are closed with the object, and at once if this fails. Payloads lie in `space`; where
// host code cannot touch them they pass through slots, `staging` for each socket. With TLS both
// ends are in this call at the same time, and it waits for the other, bounded.
Status MakeSender(std::vector<UniqueFd> sockets, device::Space& space, const Staging& staging,
                  const Options& options, std::unique_ptr<Sender>* out);
Status MakeReceiver(std::vector<UniqueFd> sockets, device::Space& space, const Staging& staging,
                    const Options& options, std::unique_ptr<Receiver>* out);

// kInternal with the reason if this process cannot do TLS; else `*version` says by what it does.
Status FindTls(std::string* version);
// Why the kernel does not make the records that senders send; "" if it does. The first call tries.
std::string WhyNoTlsInKernel();

}  // namespace hetccl::transport::tcp

#endif  // XLA_FFI_TRANSPORT_TCP_FACTORY_H_
