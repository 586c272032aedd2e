#ifndef XLA_FFI_TRANSPORT_RDMA_RECEIVER_H_
#define XLA_FFI_TRANSPORT_RDMA_RECEIVER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/common/fd.h"
#include "xla_ffi/transport/rdma/device_slots.h"
#include "xla_ffi/transport/rdma/line.h"
#include "xla_ffi/transport/rdma/registered_spans.h"
#include "xla_ffi/transport/rdma/wire.h"
#include "xla_ffi/transport/slot_copies.h"
#include "xla_ffi/transport/span_cursor.h"
#include "xla_ffi/transport/transport.h"
#include "xla_ffi/transport/window.h"

namespace hetccl::transport::rdma {

// The receiving half; see wire.h. A large payload is written into its buffer by the peer's NIC
// where this side can register it; everything else comes in slots.
class RdmaReceiver final : public Receiver {
 public:
  RdmaReceiver(UniqueFd socket, const Options& options) : line_(std::move(socket), options) {}
  ~RdmaReceiver() override { line_.Close(); }
  // Connects. Waits, bounded.
  Status Open(device::Space& space, const Staging& staging);

  // What has arrived is still good when the peer is gone.
  PeerState peer() const override;
  std::string lost_reason() const override { return line_.link().lost_reason(); }
  std::vector<int> poll_fds() const override { return line_.poll_fds(); }
  void OnReady() override { line_.OnReady(); }
  bool ArmDoorbell() override;
  void SayGoodbye() override { line_.link().SayGoodbye(); }
  bool Quiet() override;
  bool Drained() override { return true; }
  Route route() const override;
  Status Peek(const WireHeader** header) override;
  void Accept(MutablePayload payload) override;
  Status Step(Progress* progress) override;

 private:
  // All that can fail on this side alone, and so before the handshake.
  Status Allocate(device::Space& space, const Staging& staging, EndpointRecord* mine);
  Status Poll();
  Status Take(uint32_t immediate);
  // Begins to empty the next slot, with `bytes` of payload from `offset` on.
  Status EmptySlot(size_t offset, size_t bytes);
  Status EmptyChunks();
  // Offers memory for what is left of the payload, as much as the sender may know of.
  Status Offer();
  // The payload's own, as far as it can be registered.
  void OfferPayload();
  // Slots on the device.
  void OfferDeviceSlots();
  void AddGrant(const void* data, uint32_t rkey, size_t bytes);
  Status TellToUseSlots();
  // Begins to copy from the slots on the device that are full.
  Status EmptyDeviceSlots();
  Status PostGrants(uint64_t begin, uint64_t end);
  // Frees what has been copied.
  Status Free(Progress* progress);
  Status SendCredit();
  bool on_device() const { return device_slots_.memory != nullptr; }
  std::byte* device_slot(uint64_t grant) const {
    return device_slots_.memory->data() + grant % line_.slots() * slot_bytes_;
  }
  std::byte* slot(uint64_t number) const {
    return memory_->data() + number % line_.slots() * slot_bytes_;
  }

  Line line_;
  std::unique_ptr<device::SlotMemory> memory_;
  size_t slot_bytes_ = 0;
  bool addressable_ = false;
  std::shared_ptr<Registration> slots_registration_;
  SlotCopies copies_;
  device::Space* space_ = nullptr;  // outlives its channels
  DeviceSlots device_slots_;
  SlotCopies device_copies_;  // of one slot for each grant, if there are slots on the device
  // What this side writes to the peer.
  SenderBoard board_ = {};
  std::shared_ptr<Registration> board_registration_;

  std::vector<Completion> completed_;  // reused
  std::deque<uint32_t> arrived_;       // immediates of slots that are full, in their order
  uint64_t freed_ = 0;
  uint64_t credited_ = 0;  // and the sender knows
  bool credit_at_once_ = false;
  uint64_t granted_ = 0;
  uint64_t filled_ = 0;  // grants
  uint64_t device_emptied_ = 0;

  // The message under way.
  WireHeader header_;
  bool have_header_ = false;
  bool accepted_ = false;
  bool offering_ = false;            // memory is to be granted for what is left of the payload
  size_t unoffered_ = 0;             // of that, what is not granted, with slots on the device
  bool use_slots_pending_ = false;   // the sender is to be told that slots are used
  SpanCursor<MutableSpan> payload_;  // neither granted nor begun to be copied
  size_t unfilled_ = 0;              // bytes granted and not filled
  size_t direct_bytes_ = 0;          // filled, and not reported by a step yet
  RegisteredSpans spans_;
  std::vector<device::CopyPiece> pieces_;  // reused
  std::atomic<uint64_t> copied_{0};
};

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_RECEIVER_H_
