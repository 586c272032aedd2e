#ifndef XLA_FFI_TRANSPORT_RDMA_SENDER_H_
#define XLA_FFI_TRANSPORT_RDMA_SENDER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/common/fd.h"
#include "xla_ffi/transport/rdma/line.h"
#include "xla_ffi/transport/rdma/source.h"
#include "xla_ffi/transport/rdma/wire.h"
#include "xla_ffi/transport/transport.h"

namespace hetccl::transport::rdma {

// The sending half; see wire.h for what it writes where.
class RdmaSender final : public Sender {
 public:
  RdmaSender(UniqueFd socket, const Options& options) : line_(std::move(socket), options) {}
  ~RdmaSender() override;
  // Connects. Waits, bounded.
  Status Open(device::Space& space, const Staging& staging);

  PeerState peer() const override;
  std::string lost_reason() const override { return line_.link().lost_reason(); }
  std::vector<int> poll_fds() const override { return line_.poll_fds(); }
  void OnReady() override { line_.OnReady(); }
  bool ArmDoorbell() override;
  // Takes its turn behind what the NIC still sends: the peer would take it for the end.
  void SayGoodbye() override { goodbye_pending_ = true; }
  bool Quiet() override;
  bool Drained() override;
  Route route() const override;
  void Begin(const WireHeader& header, ConstPayload payload) override;
  Status Step(Progress* progress) override;
  bool peer_has_begun() const override { return peer_has_begun_; }
  // A small message is done when the NIC has it, which then may repeat its packets in vain.
  bool unconfirmed() const override {
    return line_.queue_pair().writes() > 0 && line_.link().peer() == PeerState::kAlive;
  }

 private:
  // A header on its way out, with the payload behind it if that is tiny.
  static constexpr size_t kTinyBytes = 64;
  struct Outgoing {
    WireHeader header;
    std::byte payload[kTinyBytes];
  };
  enum class Stage { kIdle, kHeader, kPayload };
  // Where the next bytes go.
  struct Target {
    uint64_t address = 0;
    size_t bytes = 0;  // 0: nowhere yet
    uint32_t rkey = 0;
    Immediate kind = Immediate::kChunk;
    uint32_t value = 0;
  };

  // Sends the goodbye if it is still to be sent.
  void SendGoodbye();
  // All that can fail on this side alone, and so before the handshake.
  Status Allocate(device::Space& space, const Staging& staging, EndpointRecord* mine);
  // Takes in what has ended and what the peer says.
  Status Poll(Progress* progress);
  Status Take(uint32_t immediate);
  Status TakeCredit(uint32_t value);
  Status TakeGrants(uint32_t count);
  // Writes what can be written now, as far as one step may.
  Status PostAll(Progress* progress);
  // Writes one piece if that can be done now.
  Status PostNext(Progress* progress, bool* posted);
  Status PostHeader(bool whole, Progress* progress, bool* posted);
  Status PostPiece(const Target& target, bool last_has_immediate, Progress* progress, bool* posted);
  Status PostWrite(const Write& write, const Piece& piece);
  Target NextTarget() const;
  bool has_slot() const { return sent_slots_ - freed_ < line_.slots(); }
  uint64_t slot_address(uint64_t number) const;
  Outgoing& outgoing(uint64_t number) { return outgoing_[number % line_.slots()]; }

  Line line_;
  Source source_;
  // What the NIC reads and the peer writes.
  SenderBoard board_ = {};
  std::shared_ptr<Registration> board_registration_;
  std::vector<Outgoing> outgoing_;
  std::shared_ptr<Registration> outgoing_registration_;

  std::deque<Piece> in_flight_;        // one for each write, empty for those without payload
  std::vector<Completion> completed_;  // reused
  uint32_t untold_ = 0;                // writes since the last one that tells its end
  uint64_t sent_slots_ = 0;
  uint64_t freed_ = 0;
  std::deque<Grant> grants_;
  uint64_t grants_taken_ = 0;   // out of the board
  uint64_t grants_filled_ = 0;  // and written to, completely

  bool goodbye_pending_ = false;

  // The message under way.
  Stage stage_ = Stage::kIdle;
  WireHeader header_;
  ConstPayload tiny_;       // the payload, if it goes with the header
  bool whole_ = false;      // the payload goes into the header's slot
  bool use_slots_ = false;  // what has no grant goes into slots
  bool peer_has_begun_ = false;
  uint64_t first_slot_ = 0;
  size_t ungranted_ = 0;      // payload bytes that grants may still be for
  size_t in_target_ = 0;      // bytes already written to the target
  size_t reading_ = 0;        // writes under way from the payload's own memory
  size_t earlier_bytes_ = 0;  // sent, and not reported by a step yet
};

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_SENDER_H_
