#ifndef XLA_FFI_TRANSPORT_SHM_SENDER_H_
#define XLA_FFI_TRANSPORT_SHM_SENDER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "xla_ffi/common/fd.h"
#include "xla_ffi/transport/link.h"
#include "xla_ffi/transport/shm/slots.h"
#include "xla_ffi/transport/span_cursor.h"
#include "xla_ffi/transport/transport.h"

namespace hetccl::transport::shm {

// The sending half: fills slots. A message's header and first bytes share its first slot. A slot is
// published when its copy, and all before it, have ended.
class ShmSender final : public Sender {
 public:
  explicit ShmSender(UniqueFd socket) : link_(std::move(socket)) {}
  Status Map(const UniqueFd& memfd, device::Space& space) {
    return slots_.Map(memfd, space, device::Direction::kOut);
  }

  PeerState peer() const override { return link_.peer(); }
  std::string lost_reason() const override { return link_.lost_reason(); }
  std::vector<int> poll_fds() const override { return {link_.fd()}; }
  void OnReady() override { link_.Read(); }
  bool ArmDoorbell() override;
  void SayGoodbye() override { link_.SayGoodbye(); }
  bool Quiet() override { return slots_.Quiet(); }
  bool Drained() override { return true; }  // the memory outlives this process
  void Begin(const WireHeader& header, ConstPayload payload) override;
  Status Step(Progress* progress) override;
  bool peer_has_begun() const override;

 private:
  // Free slots; an error if the receiver's counter makes no sense.
  Status Room(uint64_t* room) const;
  bool more() const { return header_pending_ || payload_.remaining() > 0; }
  Status FillSlot();
  // Publishes what has been copied.
  Status Publish(Progress* progress);

  Link link_;
  Slots slots_;
  uint64_t published_ = 0;
  uint64_t first_slot_ = 0;  // of the message under way
  WireHeader header_;
  bool header_pending_ = false;
  bool busy_ = false;
  SpanCursor<ConstSpan> payload_;
  std::vector<device::CopyPiece> pieces_;  // reused
};

}  // namespace hetccl::transport::shm

#endif  // XLA_FFI_TRANSPORT_SHM_SENDER_H_
