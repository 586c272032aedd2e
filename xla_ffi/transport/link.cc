#include "xla_ffi/transport/link.h"

#include <sys/socket.h>

#include <cerrno>

namespace hetccl::transport {
namespace {

constexpr char kDoorbell = 'D';
constexpr char kGoodbye = 'G';

}  // namespace

void Link::Ring(std::atomic<uint32_t>* other_sleeps) {
  // Sequentially consistent like the counter's store before and the sleeper's two steps: either we
  // see that it sleeps, or it sees the counter.
  if (other_sleeps->load(std::memory_order_seq_cst) == 0) return;
  if (other_sleeps->exchange(0, std::memory_order_seq_cst) == 0) return;
  // If the socket is full of doorbells the peer is awake enough.
  (void)!::send(socket_.get(), &kDoorbell, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Link::Read() {
  char bytes[64];
  while (peer_ == PeerState::kAlive) {
    const ssize_t count = ::recv(socket_.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (count < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      lost_reason_ = ErrnoMessage("the connection to it broke", errno);
      peer_ = PeerState::kLost;
      return;
    }
    if (count == 0) {
      lost_reason_ = "it closed the connection without a goodbye";
      peer_ = PeerState::kLost;
      return;
    }
    for (ssize_t i = 0; i < count; ++i) {
      if (bytes[i] == kGoodbye) peer_ = PeerState::kGoodbye;
    }
  }
}

void Link::SayGoodbye() {
  (void)!::send(socket_.get(), &kGoodbye, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
  ::shutdown(socket_.get(), SHUT_WR);
}

}  // namespace hetccl::transport
