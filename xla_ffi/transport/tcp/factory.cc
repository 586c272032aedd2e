#include "xla_ffi/transport/tcp/factory.h"

#include <utility>

#include "xla_ffi/transport/tcp/lanes.h"
#include "xla_ffi/transport/tcp/receiver.h"
#include "xla_ffi/transport/tcp/sender.h"

namespace hetccl::transport::tcp {

Status MakeSender(std::vector<UniqueFd> sockets, std::unique_ptr<Sender>* out) {
  if (Status status = PrepareSockets(sockets); !status.ok()) return status;
  *out = std::make_unique<TcpSender>(std::move(sockets));
  return Status();
}

Status MakeReceiver(std::vector<UniqueFd> sockets, std::unique_ptr<Receiver>* out) {
  if (Status status = PrepareSockets(sockets); !status.ok()) return status;
  *out = std::make_unique<TcpReceiver>(std::move(sockets));
  return Status();
}

}  // namespace hetccl::transport::tcp
