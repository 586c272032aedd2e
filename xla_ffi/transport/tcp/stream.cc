#include "xla_ffi/transport/tcp/stream.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>

#include <cerrno>

#include "xla_ffi/common/status.h"

namespace hetccl::transport::tcp {
namespace {

msghdr Message(const iovec* pieces, int count) {
  msghdr message = {};
  message.msg_iov = const_cast<iovec*>(pieces);  // the kernel only reads them
  message.msg_iovlen = count;
  return message;
}

Moved Some(ssize_t bytes) { return {Moved::How::kSome, static_cast<size_t>(bytes)}; }

Moved Failed(const char* what) {
  if (errno == EAGAIN || errno == EWOULDBLOCK) return {};
  return {Moved::How::kBroken, 0, ErrnoMessage(what, errno)};
}

class Plain final : public Stream {
 public:
  using Stream::Receive;
  using Stream::Send;
  using Stream::Stream;

  Moved Send(const iovec* pieces, int count) override { return SendPieces(fd(), pieces, count); }

  Moved Receive(const iovec* pieces, int count) override {
    msghdr message = Message(pieces, count);
    ssize_t received;
    do {
      received = ::recvmsg(fd(), &message, MSG_DONTWAIT);
    } while (received < 0 && errno == EINTR);
    if (received == 0) return {Moved::How::kEnd};
    return received < 0 ? Failed("the connection to it broke") : Some(received);
  }
};

}  // namespace

Moved SendMessage(int fd, const msghdr& message) {
  ssize_t sent;
  do {
    sent = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  return sent < 0 ? Failed("sending to it failed") : Some(sent);
}

Moved SendPieces(int fd, const iovec* pieces, int count) {
  return SendMessage(fd, Message(pieces, count));
}

Moved Stream::Send(const void* data, size_t bytes) {
  const iovec piece = {const_cast<void*>(data), bytes};
  return Send(&piece, 1);
}

Moved Stream::Receive(void* data, size_t bytes) {
  const iovec piece = {data, bytes};
  return Receive(&piece, 1);
}

void Stream::EndSending() { ::shutdown(fd(), SHUT_WR); }

bool Stream::Drained() {
  int domain = 0;
  socklen_t size = sizeof(domain);
  const bool known = ::getsockopt(fd(), SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0;
  if (known && domain == AF_UNIX) return true;  // the bytes are the receiver's already
  int unsent = 0;
  return ::ioctl(fd(), SIOCOUTQ, &unsent) != 0 || unsent == 0;
}

std::unique_ptr<Stream> PlainStream(UniqueFd fd) { return std::make_unique<Plain>(std::move(fd)); }

}  // namespace hetccl::transport::tcp
