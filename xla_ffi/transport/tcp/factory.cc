#include "xla_ffi/transport/tcp/factory.h"

#include <algorithm>
#include <utility>

#include "xla_ffi/transport/tcp/kernel_tls.h"
#include "xla_ffi/transport/tcp/lanes.h"
#include "xla_ffi/transport/tcp/openssl.h"
#include "xla_ffi/transport/tcp/receiver.h"
#include "xla_ffi/transport/tcp/sender.h"
#include "xla_ffi/transport/tcp/stream.h"
#include "xla_ffi/transport/tcp/tls.h"

namespace hetccl::transport::tcp {

namespace {

Status MakeStreams(std::vector<UniqueFd> sockets, const Options& options, TlsRole role,
                   std::vector<std::unique_ptr<Stream>>* streams) {
  if (!options.tls_keys.empty() && options.tls_keys.size() != sockets.size()) {
    return InternalError("a tcp channel of " + std::to_string(sockets.size()) + " sockets has " +
                         std::to_string(options.tls_keys.size()) + " TLS keys");
  }
  TimePoint now = Clock::now();
  const TimePoint deadline = now + options.patience;
  for (size_t i = 0; i < sockets.size(); ++i, now = Clock::now()) {
    if (options.tls_keys.empty()) {
      streams->push_back(PlainStream(std::move(sockets[i])));
      continue;
    }
    const Duration left = std::max(Duration::zero(), deadline - now);
    const TlsOptions tls = {options.tls_keys[i], role, left, options.tls_records_per_key,
                            options.tls_in_kernel};
    std::unique_ptr<Stream> stream;
    if (Status status = TlsStream(std::move(sockets[i]), tls, &stream); !status.ok()) return status;
    streams->push_back(std::move(stream));
  }
  return Status();
}

template <typename Half, typename WindowType, typename Interface>
Status Make(std::vector<UniqueFd> sockets, device::Space& space, const Staging& staging,
            const Options& options, TlsRole role, std::unique_ptr<Interface>* out) {
  if (Status status = PrepareSockets(sockets); !status.ok()) return status;
  // Before the windows: a GPU's wait until no stream is held, and the peer, which waits in the
  // handshake, may be what the holds wait for.
  std::vector<std::unique_ptr<Stream>> streams;
  if (Status status = MakeStreams(std::move(sockets), options, role, &streams); !status.ok()) {
    return status;
  }
  std::vector<std::unique_ptr<WindowType>> windows(streams.size());
  for (auto& window : windows) {
    if (Status status = MakeWindow(space, staging, &window); !status.ok()) return status;
  }
  *out = std::make_unique<Half>(std::move(streams), std::move(windows), options.checksum);
  return Status();
}

}  // namespace

Status MakeSender(std::vector<UniqueFd> sockets, device::Space& space, const Staging& staging,
                  const Options& options, std::unique_ptr<Sender>* out) {
  return Make<TcpSender, SendWindow>(std::move(sockets), space, staging, options, TlsRole::kClient,
                                     out);
}

Status MakeReceiver(std::vector<UniqueFd> sockets, device::Space& space, const Staging& staging,
                    const Options& options, std::unique_ptr<Receiver>* out) {
  return Make<TcpReceiver, ReceiveWindow>(std::move(sockets), space, staging, options,
                                          TlsRole::kServer, out);
}

Status FindTls(std::string* version) {
  const openssl::Library* library = nullptr;
  if (Status status = openssl::Load(&library); !status.ok()) return status;
  *version = library->version(openssl::kVersionText);
  return Status();
}

std::string WhyNoTlsInKernel() { return WhyNoKernelTls(); }

}  // namespace hetccl::transport::tcp
