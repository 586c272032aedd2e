// How the bytes of a message are spread over a channel's sockets, and the sockets themselves.
#ifndef XLA_FFI_TRANSPORT_TCP_LANES_H_
#define XLA_FFI_TRANSPORT_TCP_LANES_H_

#include <cstddef>
#include <string>
#include <vector>

#include "xla_ffi/common/fd.h"
#include "xla_ffi/common/status.h"

namespace hetccl::transport::tcp {

// Payloads up to this size use the first socket only: a second system call costs more than it
// gains. Part of the protocol, since both sides derive the stripes from the payload's size.
inline constexpr size_t kStripeAbove = 256 * 1024;
// For payloads above this size the receiver says on the way back that it has begun, so that a slow
// peer can be told from a stuck one. Smaller ones fit into the socket's buffers.
inline constexpr size_t kAcknowledgeAbove = 64 * 1024;
// One step moves at most this much per socket, so that channels of one proxy thread share it.
inline constexpr size_t kStepBytes = 1 << 20;
// In so many pieces at most.
inline constexpr int kMaxPieces = 16;

// Bytes that go the other way on the first socket.
inline constexpr char kAcknowledge = 'A';
inline constexpr char kGoodbyeByte = 'G';

// The part of a payload that socket number `lane` of `lanes` carries.
struct Stripe {
  size_t begin;
  size_t end;
};
Stripe StripeOf(size_t payload_bytes, size_t lane, size_t lanes);

// Makes the sockets non-blocking and sets what suits their path: no delay, and on loopback explicit
// large buffers (elsewhere the kernel's own tuning follows the path's delay better).
Status PrepareSockets(const std::vector<UniqueFd>& sockets);

// How a socket's two ends are called: "10.0.0.1:4711 to 10.0.0.2:4712", peer first; empty for local
// sockets.
std::string PathName(int fd);
// An error of what a socket brought, with the socket that it was.
Status ChangedOnTheWay(size_t lane, size_t lanes, int fd, const Status& status);

}  // namespace hetccl::transport::tcp

#endif  // XLA_FFI_TRANSPORT_TCP_LANES_H_
