// The interface that every transport implements and the conformance suite checks.
//
// A channel is one direction between two ranks: a Sender in one process, a Receiver in the other.
// Both are driven by one proxy thread each, never block, and move one message at a time in order.
// Unless said otherwise every function is called on that proxy thread only.
//
// Every channel keeps a stream socket open in both directions (also when the payload goes another
// way), so that the end of a peer shows at once. A peer that ends in an orderly way says goodbye
// first; the end of the stream without a goodbye means that the peer died.
#ifndef XLA_FFI_TRANSPORT_TRANSPORT_H_
#define XLA_FFI_TRANSPORT_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "xla_ffi/common/status.h"
#include "xla_ffi/transport/message.h"

namespace hetccl::transport {

enum class PeerState {
  kAlive,
  kGoodbye,  // closed in an orderly way; nothing will move any more
  kLost,     // the stream ended or broke without a goodbye
};

// What one step achieved.
struct Progress {
  size_t bytes = 0;   // payload bytes moved by this step
  bool done = false;  // the message is complete: its memory is the caller's again
  // A copy is under way that wakes nobody when it ends: step again soon, whatever the peer does.
  bool copying = false;
};

// By which device a channel goes that has one of its own, for people.
struct Route {
  std::string device;  // empty: the channel has none
  int port = 0;
  std::string slots;           // where its slots lie and why there, and how buffers are registered
  uint64_t copied = 0;         // payload bytes that a CPU of this side has copied so far
  uint64_t registrations = 0;  // of memory with the device that this process has made so far
};

// What the two halves have in common.
class Endpoint {
 public:
  virtual ~Endpoint() = default;

  // The peer as far as the last call of any function noticed.
  virtual PeerState peer() const = 0;
  // Why the peer counts as lost, for an error message.
  virtual std::string lost_reason() const = 0;

  // Descriptors whose readiness makes another step worth while. Constant; they are watched edge
  // triggered, so a step goes on until nothing moves or it reports progress.
  virtual std::vector<int> poll_fds() const = 0;
  // Called when one of them has become ready, before the next step.
  virtual void OnReady() = 0;
  // Called before the proxy thread sleeps while this endpoint waits for the peer: makes the peer
  // wake poll_fds(). True if something can be moved right now, so that sleeping would be wrong.
  virtual bool ArmDoorbell() = 0;
  // Whether nothing on this side touches the memory of the message under way at this moment. If
  // not, it will without another step: copies that have begun end. For giving a message up: a NIC
  // that could still touch the memory is stopped by this, and nothing moves any more.
  virtual bool Quiet() { return true; }
  // Tells the peer that this side closes. Best effort: the peer may be gone, and a message that is
  // half sent cannot be followed by anything. Nothing may be moved afterwards.
  virtual void SayGoodbye() = 0;
  // True once nothing that was sent depends on this process any more, so that closing loses none of
  // it. Meant to be asked again, for a bounded time, after SayGoodbye; where the goodbye goes
  // another way than the payload, it is sent by this or at the latest by the destructor.
  virtual bool Drained() = 0;
  // Any thread.
  virtual Route route() const { return {}; }
};

class Sender : public Endpoint {
 public:
  // Takes on one message; requires that none is under way. The payload's memory must stay valid
  // and unchanged until a step reports done or the sender is destroyed.
  virtual void Begin(const WireHeader& header, ConstPayload payload) = 0;
  // Moves what can be moved now; without a message it only looks after the peer. Returns an error
  // for what breaks the channel other than a lost peer.
  virtual Status Step(Progress* progress) = 0;
  // Whether the peer has begun to take the message under way: until then it may simply not have
  // reached the operation yet. Only meaningful between Begin and done.
  virtual bool peer_has_begun() const = 0;
  // Whether something of a message that is done may still fail: the caller steps on until it has
  // not, or its failure would be heard with the next message only.
  virtual bool unconfirmed() const { return false; }
};

class Receiver : public Endpoint {
 public:
  // Looks for the next message. *header points to its header, valid until the message is done, or
  // is null while none has arrived. Requires that no message was accepted or that it is done.
  virtual Status Peek(const WireHeader** header) = 0;
  // Says where the payload of the message last peeked goes. The spans hold payload_bytes in all;
  // their memory is written until a step reports done or the receiver is destroyed.
  virtual void Accept(MutablePayload payload) = 0;
  // Moves what can be moved now of the accepted message.
  virtual Status Step(Progress* progress) = 0;
};

}  // namespace hetccl::transport

#endif  // XLA_FFI_TRANSPORT_TRANSPORT_H_
