// The secret that one side of TLS 1.3 sends with, and the keys that come from it (RFC 8446, 7.1 to
// 7.3), for the one cipher suite that channels have: TLS_AES_128_GCM_SHA256.
#ifndef XLA_FFI_TRANSPORT_TCP_TRAFFIC_SECRET_H_
#define XLA_FFI_TRANSPORT_TCP_TRAFFIC_SECRET_H_

#include <cstddef>
#include <string_view>

#include "xla_ffi/transport/tcp/openssl.h"

namespace hetccl::transport::tcp {

// What records are encrypted with. Wiped when destroyed.
struct TrafficKey {
  TrafficKey() = default;
  TrafficKey(const TrafficKey&) = delete;
  TrafficKey& operator=(const TrafficKey&) = delete;
  ~TrafficKey();

  unsigned char key[16] = {};
  unsigned char iv[12] = {};
};

// Wiped when destroyed. Movable, not copyable. For one thread at a time.
class TrafficSecret {
 public:
  TrafficSecret() = default;
  TrafficSecret(TrafficSecret&& other) noexcept;
  TrafficSecret& operator=(TrafficSecret&& other) = delete;
  ~TrafficSecret();

  // Takes the client's first secret of the data phase from a line of OpenSSL's key log. Lines that
  // hold another secret change nothing.
  void Read(std::string_view line);
  bool known() const { return known_; }

  // Both are false if libcrypto fails, and then nothing has changed.
  bool Derive(const openssl::Library& library, TrafficKey* key) const;
  // Goes on to the secret behind a KeyUpdate.
  bool Advance(const openssl::Library& library);

 private:
  static constexpr size_t kBytes = 32;  // of a SHA-256

  // HKDF-Expand-Label without a context, of at most kBytes.
  bool Expand(const openssl::Library& library, std::string_view label, unsigned char* out,
              size_t bytes) const;

  unsigned char secret_[kBytes] = {};
  bool known_ = false;
};

}  // namespace hetccl::transport::tcp

#endif  // XLA_FFI_TRANSPORT_TCP_TRAFFIC_SECRET_H_
