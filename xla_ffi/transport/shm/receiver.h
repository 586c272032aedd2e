#ifndef XLA_FFI_TRANSPORT_SHM_RECEIVER_H_
#define XLA_FFI_TRANSPORT_SHM_RECEIVER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "xla_ffi/common/fd.h"
#include "xla_ffi/transport/link.h"
#include "xla_ffi/transport/shm/slots.h"
#include "xla_ffi/transport/span_cursor.h"
#include "xla_ffi/transport/transport.h"

namespace hetccl::transport::shm {

// The receiving half: empties slots. A slot is freed when its copy, and all before it, have ended.
class ShmReceiver final : public Receiver {
 public:
  explicit ShmReceiver(UniqueFd socket) : link_(std::move(socket)) {}
  Status Map(const UniqueFd& memfd, device::Space& space) {
    return slots_.Map(memfd, space, device::Direction::kIn);
  }

  // What the peer left in the ring is still good when the peer is gone.
  PeerState peer() const override;
  std::string lost_reason() const override { return link_.lost_reason(); }
  std::vector<int> poll_fds() const override { return {link_.fd()}; }
  void OnReady() override { link_.Read(); }
  bool ArmDoorbell() override;
  void SayGoodbye() override { link_.SayGoodbye(); }
  bool Quiet() override { return slots_.Quiet(); }
  bool Drained() override { return true; }
  Status Peek(const WireHeader** header) override;
  void Accept(MutablePayload payload) override;
  Status Step(Progress* progress) override;

 private:
  // Filled slots that are not begun; an error if the sender's counter makes no sense.
  Status Filled(uint64_t* filled) const;
  bool more() const { return in_first_slot_ || payload_.remaining() > 0; }
  Status EmptySlot();
  // Frees what has been copied.
  Status Free(Progress* progress);

  Link link_;
  Slots slots_;
  uint64_t freed_ = 0;
  WireHeader header_;
  bool have_header_ = false;
  bool in_first_slot_ = false;
  uint64_t first_slot_ = 0;  // of the message under way
  bool streaming_ = false;
  SpanCursor<MutableSpan> payload_;
  std::vector<device::CopyPiece> pieces_;  // reused
};

}  // namespace hetccl::transport::shm

#endif  // XLA_FFI_TRANSPORT_SHM_RECEIVER_H_
