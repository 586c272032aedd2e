// The bytes of one socket of a tcp channel: as they are, or inside of something (tls.h).
#ifndef XLA_FFI_TRANSPORT_TCP_STREAM_H_
#define XLA_FFI_TRANSPORT_TCP_STREAM_H_

#include <sys/socket.h>
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "xla_ffi/common/fd.h"

namespace hetccl::transport::tcp {

// What one attempt to move bytes came to.
struct Moved {
  enum class How {
    kSome,     // `bytes` of them, at least one
    kNothing,  // not now: the descriptor tells when to try again
    kEnd,      // the peer has closed
    kBroken,   // for this reason
    kForged,   // something came that the peer did not send, for this reason
  };
  How how = How::kNothing;
  size_t bytes = 0;
  std::string reason = {};
};

// One sendmsg that does not wait, of bytes as they are.
Moved SendMessage(int fd, const msghdr& message);
Moved SendPieces(int fd, const iovec* pieces, int count);

// Owns the socket. Used by one thread at a time; never blocks.
class Stream {
 public:
  explicit Stream(UniqueFd fd) : fd_(std::move(fd)) {}
  virtual ~Stream() = default;

  int fd() const { return fd_.get(); }
  // After kNothing the next call must begin with the same bytes.
  virtual Moved Send(const iovec* pieces, int count) = 0;
  virtual Moved Receive(const iovec* pieces, int count) = 0;
  Moved Send(const void* data, size_t bytes);
  Moved Receive(void* data, size_t bytes);
  // No bytes will follow.
  virtual void EndSending();
  // Whether the peer's kernel has all that was sent, or never will: then closing loses nothing. To
  // be asked again until it does.
  virtual bool Drained();

 private:
  UniqueFd fd_;
};

std::unique_ptr<Stream> PlainStream(UniqueFd fd);

}  // namespace hetccl::transport::tcp

#endif  // XLA_FFI_TRANSPORT_TCP_STREAM_H_
