// A socket's bytes in TLS 1.3, by OpenSSL, between two ends that already share a key.
//
// The key is an external pre-shared one (RFC 8446, 2.2), so there are no certificates; (EC)DHE
// comes on top of it, so that the key alone does not open a recording. Behind the handshake the
// kernel sends what the client does, where it can (kernel_tls.h).
#ifndef XLA_FFI_TRANSPORT_TCP_TLS_H_
#define XLA_FFI_TRANSPORT_TCP_TLS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/common/fd.h"
#include "xla_ffi/common/status.h"
#include "xla_ffi/transport/tcp/stream.h"

namespace hetccl::transport::tcp {

// One end has the one, the other the other.
enum class TlsRole { kClient, kServer };

// As in options.h, of one socket.
struct TlsOptions {
  std::string key;
  TlsRole role;
  Duration patience;
  uint64_t records_per_key;
  bool in_kernel;
};

// Does the handshake with the peer, which is in the same call: waits, bounded. An error names both
// addresses and the reason. `fd` is closed if this fails.
Status TlsStream(UniqueFd fd, const TlsOptions& options, std::unique_ptr<Stream>* out);

}  // namespace hetccl::transport::tcp

#endif  // XLA_FFI_TRANSPORT_TCP_TLS_H_
