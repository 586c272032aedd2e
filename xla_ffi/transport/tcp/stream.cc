#include "xla_ffi/transport/tcp/stream.h"

#include <sys/socket.h>

#include <cerrno>

#include "xla_ffi/common/status.h"

namespace hetccl::transport::tcp {
namespace {

class Plain final : public Stream {
 public:
  using Stream::Receive;
  using Stream::Send;
  using Stream::Stream;

  Moved Send(const iovec* pieces, int count) override {
    const msghdr message = Message(pieces, count);
    ssize_t sent;
    do {
      sent = ::sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    return sent < 0 ? Failed("sending to it failed") : Some(sent);
  }

  Moved Receive(const iovec* pieces, int count) override {
    msghdr message = Message(pieces, count);
    ssize_t received;
    do {
      received = ::recvmsg(fd(), &message, MSG_DONTWAIT);
    } while (received < 0 && errno == EINTR);
    if (received == 0) return {Moved::How::kEnd};
    return received < 0 ? Failed("the connection to it broke") : Some(received);
  }

 private:
  static msghdr Message(const iovec* pieces, int count) {
    msghdr message = {};
    message.msg_iov = const_cast<iovec*>(pieces);  // the kernel only reads them
    message.msg_iovlen = count;
    return message;
  }
  static Moved Some(ssize_t bytes) { return {Moved::How::kSome, static_cast<size_t>(bytes)}; }
  static Moved Failed(const char* what) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return {};
    return {Moved::How::kBroken, 0, ErrnoMessage(what, errno)};
  }
};

}  // namespace

Moved Stream::Send(const void* data, size_t bytes) {
  const iovec piece = {const_cast<void*>(data), bytes};
  return Send(&piece, 1);
}

Moved Stream::Receive(void* data, size_t bytes) {
  const iovec piece = {data, bytes};
  return Receive(&piece, 1);
}

void Stream::EndSending() { ::shutdown(fd(), SHUT_WR); }

std::unique_ptr<Stream> PlainStream(UniqueFd fd) { return std::make_unique<Plain>(std::move(fd)); }

}  // namespace hetccl::transport::tcp
