// What goes over the sockets of a channel besides the payload.
#ifndef XLA_FFI_TRANSPORT_TCP_OPTIONS_H_
#define XLA_FFI_TRANSPORT_TCP_OPTIONS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "xla_ffi/common/clock.h"

namespace hetccl::transport::tcp {

inline constexpr size_t kTlsKeyBytes = 32;

// The same on both sides, besides the last.
struct Options {
  // A bit that changes on the way is an error of the receiver.
  bool checksum = false;
  // Of each socket, in their order: kTlsKeyBytes that only the two ends know, for this connection
  // alone. Empty: no TLS.
  std::vector<std::string> tls_keys = {};
  // For the peer's part of the TLS handshakes of all sockets. Its death shows earlier.
  Duration patience = std::chrono::seconds(60);
  // Then the key that a side of TLS sends with is replaced: RFC 8446, 5.5 allows 2^24.5 full
  // records for AES-GCM.
  uint64_t tls_records_per_key = uint64_t{1} << 24;
  // Whether the kernel makes the sender's records of TLS, where it can.
  bool tls_in_kernel = true;
};

}  // namespace hetccl::transport::tcp

#endif  // XLA_FFI_TRANSPORT_TCP_OPTIONS_H_
