#include "xla_ffi/transport/tcp/factory.h"

#include <utility>

#include "xla_ffi/transport/tcp/lanes.h"
#include "xla_ffi/transport/tcp/receiver.h"
#include "xla_ffi/transport/tcp/sender.h"

namespace hetccl::transport::tcp {

namespace {

template <typename Half, typename WindowType, typename Interface>
Status Make(std::vector<UniqueFd> sockets, device::Space& space, const Staging& staging,
            bool checksum, std::unique_ptr<Interface>* out) {
  if (Status status = PrepareSockets(sockets); !status.ok()) return status;
  std::vector<std::unique_ptr<WindowType>> windows(sockets.size());
  for (auto& window : windows) {
    if (Status status = MakeWindow(space, staging, &window); !status.ok()) return status;
  }
  *out = std::make_unique<Half>(std::move(sockets), std::move(windows), checksum);
  return Status();
}

}  // namespace

Status MakeSender(std::vector<UniqueFd> sockets, device::Space& space, const Staging& staging,
                  bool checksum, std::unique_ptr<Sender>* out) {
  return Make<TcpSender, SendWindow>(std::move(sockets), space, staging, checksum, out);
}

Status MakeReceiver(std::vector<UniqueFd> sockets, device::Space& space, const Staging& staging,
                    bool checksum, std::unique_ptr<Receiver>* out) {
  return Make<TcpReceiver, ReceiveWindow>(std::move(sockets), space, staging, checksum, out);
}

}  // namespace hetccl::transport::tcp
