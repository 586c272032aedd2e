#include "xla_ffi/transport/tcp/kernel_tls.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "xla_ffi/common/fd.h"

namespace hetccl::transport::tcp {
namespace {

using kernel::CryptoInfo;
using openssl::Library;

constexpr unsigned char kAlertRecord = 21;
constexpr unsigned char kHandshakeRecord = 22;
// A key_update without a request for one of the peer (RFC 8446, 4.6.3).
constexpr unsigned char kKeyUpdate[] = {24, 0, 0, 1, 0};
constexpr unsigned char kWarning = 1;
constexpr unsigned char kFatal = 2;

// One end of a connection that waits to be accepted by the other. Bounded: a firewall may drop what
// goes over loopback.
Status Connect(UniqueFd* listener, UniqueFd* client) {
  *listener = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  *client = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* any = reinterpret_cast<sockaddr*>(&address);
  const timeval patience = {1, 0};
  if (::bind(listener->get(), any, size) != 0 || ::listen(listener->get(), 1) != 0 ||
      ::getsockname(listener->get(), any, &size) != 0 ||
      ::setsockopt(client->get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience)) != 0 ||
      ::connect(client->get(), any, size) != 0) {
    return InternalError(ErrnoMessage("a connection over loopback to try it", errno));
  }
  return Status();
}

Status Try() {
  const Library* library = nullptr;
  if (Status status = openssl::Load(&library); !status.ok()) return status;
  UniqueFd listener, client;
  if (Status status = Connect(&listener, &client); !status.ok()) return status;
  TrafficSecret secret;
  secret.Read("CLIENT_TRAFFIC_SECRET_0 0 " + std::string(64, '0'));
  std::unique_ptr<KernelTls> tls;
  if (Status status = KernelTls::Start(client.get(), std::move(secret), 1, *library, &tls);
      !status.ok()) {
    return status;
  }
  const Moved renewed = tls->Renew();
  return renewed.how == Moved::How::kSome ? Status()
                                          : InternalError("trying it: " + renewed.reason);
}

}  // namespace

Status KernelTls::Start(int fd, TrafficSecret secret, uint64_t records_per_key,
                        const Library& library, std::unique_ptr<KernelTls>* out) {
  constexpr char kName[] = "tls";
  if (::setsockopt(fd, IPPROTO_TCP, kernel::kTcpUlp, kName, sizeof(kName) - 1) != 0) {
    const bool missing = errno == ENOENT;
    return InternalError(ErrnoMessage("the kernel's TLS", errno) +
                         (missing ? " (its module may be there: modprobe tls)" : ""));
  }
  std::unique_ptr<KernelTls> made(new KernelTls(fd, std::move(secret), records_per_key, library));
  if (Status status = made->Install(); !status.ok()) return status;
  *out = std::move(made);
  return Status();
}

Moved KernelTls::Send(const iovec* pieces, int count) {
  if (failed_.how != Moved::How::kNothing) return failed_;
  if (records_ >= records_per_key_) {
    if (const Moved renewed = Renew(); renewed.how != Moved::How::kSome) return renewed;
  }
  const Moved sent = SendPieces(fd_, pieces, count);
  // Rather too many: a call's last record is short.
  if (sent.how == Moved::How::kSome) records_ += sent.bytes / kTlsRecordBytes + 1;
  return sent;
}

Moved KernelTls::Renew() {
  // A call of sendmsg leaves no record open, also when it took only a part: what it took is
  // encrypted, with the old key, even if it still waits for room in the socket. So this record
  // comes behind it, and the new key concerns only what follows.
  const Moved told = SendRecord(kHandshakeRecord, kKeyUpdate, sizeof(kKeyUpdate));
  if (told.how != Moved::How::kSome) return told;
  Status status = secret_.Advance(library_) ? Install() : InternalError("libcrypto failed");
  if (!status.ok()) {
    failed_ = {Moved::How::kBroken, 0, "no new key: " + status.message()};
    return failed_;
  }
  records_ = 0;
  return told;
}

Moved KernelTls::Send(Alert alert) {
  const unsigned char level = alert == Alert::kCloseNotify ? kWarning : kFatal;
  const unsigned char text[] = {level, static_cast<unsigned char>(alert)};
  return SendRecord(kAlertRecord, text, sizeof(text));
}

Moved KernelTls::SendRecord(unsigned char type, const void* data, size_t bytes) {
  if (failed_.how != Moved::How::kNothing) return failed_;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(type))] = {};
  iovec piece = {const_cast<void*>(data), bytes};
  msghdr message = {};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = kernel::kSolTls;
  head->cmsg_type = kernel::kTlsSetRecordType;
  head->cmsg_len = CMSG_LEN(sizeof(type));
  std::memcpy(CMSG_DATA(head), &type, sizeof(type));
  return SendMessage(fd_, message);
}

Status KernelTls::Install() {
  TrafficKey key;
  if (!secret_.Derive(library_, &key)) return InternalError("libcrypto failed");
  CryptoInfo info = {};
  info.version = kernel::kTls13;
  info.cipher = kernel::kAesGcm128;
  static_assert(sizeof(info.salt) + sizeof(info.iv) == sizeof(key.iv));
  std::memcpy(info.key, key.key, sizeof(info.key));
  std::memcpy(info.salt, key.iv, sizeof(info.salt));
  std::memcpy(info.iv, key.iv + sizeof(info.salt), sizeof(info.iv));
  const int result = ::setsockopt(fd_, kernel::kSolTls, kernel::kTlsTx, &info, sizeof(info));
  const int error = errno;
  ::explicit_bzero(&info, sizeof(info));
  if (result == 0) return Status();
  if (error == EBUSY) {
    return InternalError(ErrnoMessage("Linux takes a second one since 6.14", error));
  }
  return InternalError(ErrnoMessage("the kernel's TLS 1.3 with AES-128-GCM", error));
}

const std::string& WhyNoKernelTls() {
  static const std::string why = [] {
    const Status status = Try();
    return status.ok() ? std::string() : status.message();
  }();
  return why;
}

}  // namespace hetccl::transport::tcp
