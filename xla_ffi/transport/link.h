// The stream socket beside a payload that goes another way: doorbells, the goodbye, and the peer's
// end.
#ifndef XLA_FFI_TRANSPORT_LINK_H_
#define XLA_FFI_TRANSPORT_LINK_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "xla_ffi/common/fd.h"
#include "xla_ffi/transport/transport.h"

namespace hetccl::transport {

// One side's end. Proxy thread only.
class Link {
 public:
  explicit Link(UniqueFd socket) : socket_(std::move(socket)) {}

  int fd() const { return socket_.get(); }
  PeerState peer() const { return peer_; }
  const std::string& lost_reason() const { return lost_reason_; }

  // Wakes the other side if it sleeps. Call after the counter that it waits for was advanced.
  void Ring(std::atomic<uint32_t>* other_sleeps);
  // Takes in what the other side sent, so that peer() is up to date. Call when the socket is ready.
  void Read();
  void SayGoodbye();

 private:
  UniqueFd socket_;
  PeerState peer_ = PeerState::kAlive;
  std::string lost_reason_;
};

}  // namespace hetccl::transport

#endif  // XLA_FFI_TRANSPORT_LINK_H_
