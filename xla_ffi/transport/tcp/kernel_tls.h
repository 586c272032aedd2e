// The kernel's TLS, as the sending half of a TLS 1.3 connection whose handshake OpenSSL has done.
//
// Behind the handshake the kernel makes the records, of up to 16 KB, of what sendmsg gives it: no
// copy into OpenSSL's buffers. A kernel is used only if it takes new keys too (Linux 6.14 and
// newer), since AES-GCM needs them. Receiving stays with OpenSSL: the direction of the payload is
// encrypted by its sender, and the other one carries single bytes.
#ifndef XLA_FFI_TRANSPORT_TCP_KERNEL_TLS_H_
#define XLA_FFI_TRANSPORT_TCP_KERNEL_TLS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "xla_ffi/common/status.h"
#include "xla_ffi/transport/tcp/openssl.h"
#include "xla_ffi/transport/tcp/stream.h"
#include "xla_ffi/transport/tcp/traffic_secret.h"

namespace hetccl::transport::tcp {

// The values of linux/tls.h and linux/tcp.h, which older systems to build on lack;
// kernel_tls_test.cc compares them with the headers.
namespace kernel {

inline constexpr int kSolTls = 282;
inline constexpr int kTcpUlp = 31;
inline constexpr int kTlsTx = 1;
inline constexpr int kTlsSetRecordType = 1;
inline constexpr uint16_t kTls13 = 0x0304;
inline constexpr uint16_t kAesGcm128 = 51;

// tls12_crypto_info_aes_gcm_128
struct CryptoInfo {
  uint16_t version;
  uint16_t cipher;
  unsigned char iv[8];  // behind the salt
  unsigned char key[16];
  unsigned char salt[4];
  unsigned char sequence[8];  // the number of the next record
};

}  // namespace kernel

// The most that a record holds (RFC 8446, 5.1).
inline constexpr size_t kTlsRecordBytes = 16 * 1024;

// What a record says that is no data (RFC 8446, 6).
enum class Alert : unsigned char { kCloseNotify = 0, kBadRecordMac = 20 };

// For one thread at a time; never blocks. Does not own the socket.
class KernelTls {
 public:
  // `secret` is known, and no record has been sent with it. The key is replaced when about
  // `records_per_key` were, at the begin of a call of Send. An error says what the kernel refused;
  // the socket sends bytes as they are then, as before.
  static Status Start(int fd, TrafficSecret secret, uint64_t records_per_key,
                      const openssl::Library& library, std::unique_ptr<KernelTls>* out);

  // As Stream's.
  Moved Send(const iovec* pieces, int count);
  // Tells the peer that another key follows, and takes it. kSome: done; kNothing: nothing is.
  Moved Renew();
  Moved Send(Alert alert);

 private:
  KernelTls(int fd, TrafficSecret secret, uint64_t records_per_key, const openssl::Library& library)
      : fd_(fd), secret_(std::move(secret)), records_per_key_(records_per_key), library_(library) {}

  Moved SendRecord(unsigned char type, const void* data, size_t bytes);
  // Gives the kernel the present secret's key, whose records count from 0.
  Status Install();

  const int fd_;
  TrafficSecret secret_;
  const uint64_t records_per_key_;
  const openssl::Library& library_;
  uint64_t records_ = 0;  // sent with the present key
  Moved failed_;          // stays: the peer expects a key that the kernel does not have
};

// Why this process cannot send through the kernel, found out once by doing it all on a connection
// of its own, over loopback; "" if it can.
const std::string& WhyNoKernelTls();

}  // namespace hetccl::transport::tcp

#endif  // XLA_FFI_TRANSPORT_TCP_KERNEL_TLS_H_
