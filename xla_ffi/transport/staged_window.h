// Windows over a ring of slots, for payloads that host code cannot touch.
#ifndef XLA_FFI_TRANSPORT_STAGED_WINDOW_H_
#define XLA_FFI_TRANSPORT_STAGED_WINDOW_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "xla_ffi/transport/window.h"

namespace hetccl::transport {

// What both directions share: a ring of slots, each of which holds the next bytes of the payload,
// and a copier. Slots are taken, copied and given back in their order; positions count slots since
// the ring was made.
class StagingRing {
 public:
  Status Make(device::Space& space, device::Direction direction, const Staging& staging);
  void Make(std::unique_ptr<device::SlotMemory> memory, std::unique_ptr<device::Copier> copier,
            const Staging& staging);

  std::byte* slot(uint64_t number) const {
    return memory_->data() + number % lengths_.size() * slot_bytes_;
  }
  size_t slot_bytes() const { return slot_bytes_; }
  uint64_t slots() const { return lengths_.size(); }
  size_t& length(uint64_t number) { return lengths_[number % lengths_.size()]; }
  size_t length(uint64_t number) const { return lengths_[number % lengths_.size()]; }

  bool copier_has_room() const {
    return copied_begun_ - copied_ < static_cast<uint64_t>(copier_->depth());
  }
  Status Copy(const std::vector<device::CopyPiece>& pieces);
  // Slots whose copy was begun, and of those, ended.
  uint64_t copied_begun() const { return copied_begun_; }
  uint64_t copied() const { return copied_; }
  Status Poll() { return copier_->Poll(&copied_); }
  bool Quiet() { return copier_->Quiet(); }

 private:
  std::unique_ptr<device::SlotMemory> memory_;
  std::unique_ptr<device::Copier> copier_;  // before the memory is released
  size_t slot_bytes_ = 0;
  std::vector<size_t> lengths_;  // payload bytes in each slot
  uint64_t copied_begun_ = 0;
  uint64_t copied_ = 0;
};

// Device -> slot -> socket.
class StagedSendWindow final : public SendWindow {
 public:
  Status Make(device::Space& space, const Staging& staging) {
    return ring_.Make(space, device::Direction::kOut, staging);
  }
  void Begin(std::vector<ConstSpan> payload) override;
  Status Pump() override;
  int Gather(size_t limit, iovec* out, int capacity) const override;
  void Advance(size_t bytes) override;
  bool finished() const override {
    return payload_.remaining() == 0 && sent_ == ring_.copied_begun();
  }
  bool copying() const override { return ring_.copied() < ring_.copied_begun(); }
  bool Quiet() override { return ring_.Quiet(); }

 private:
  StagingRing ring_;
  SpanCursor<ConstSpan> payload_;  // not yet given to the copier
  std::vector<device::CopyPiece> pieces_;
  uint64_t sent_ = 0;      // slots that the socket has sent
  size_t sent_bytes_ = 0;  // of the next one
};

// Socket -> slot -> device.
class StagedReceiveWindow final : public ReceiveWindow {
 public:
  Status Make(device::Space& space, const Staging& staging) {
    return ring_.Make(space, device::Direction::kIn, staging);
  }
  void Begin(std::vector<MutableSpan> payload) override;
  Status Pump() override;
  int Gather(size_t limit, iovec* out, int capacity) const override;
  void Advance(size_t bytes) override;
  bool finished() const override {
    return unreceived_ == 0 && payload_.remaining() == 0 && !copying();
  }
  bool copying() const override { return ring_.copied() < ring_.copied_begun(); }
  bool Quiet() override { return ring_.Quiet(); }

 private:
  StagingRing ring_;
  SpanCursor<MutableSpan> payload_;  // not yet given to the copier
  std::vector<device::CopyPiece> pieces_;
  size_t unreceived_ = 0;    // bytes that the socket has not delivered
  uint64_t filled_ = 0;      // slots that are full, or hold the payload's end
  size_t filled_bytes_ = 0;  // of the next one
};

}  // namespace hetccl::transport

#endif  // XLA_FFI_TRANSPORT_STAGED_WINDOW_H_
