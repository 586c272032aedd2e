// The copies between a ring of slots and the buffers of this side.
#ifndef XLA_FFI_TRANSPORT_SLOT_COPIES_H_
#define XLA_FFI_TRANSPORT_SLOT_COPIES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "xla_ffi/device/space.h"

namespace hetccl::transport {

// Slots are begun in their order, each with one copy (or none), and end in that order. Numbers
// count slots since the ring was made. Used by one thread at a time.
class SlotCopies {
 public:
  Status Make(device::Space& space, device::Direction direction, size_t slot_bytes, uint64_t slots);
  void Make(std::unique_ptr<device::Copier> copier, uint64_t slots);

  // Slots begun, and those of them whose copy has ended.
  uint64_t begun() const { return begun_; }
  Status Ended(uint64_t* ended);
  bool Quiet() { return copier_->Quiet(); }

  // Whether another copy is worth having under way.
  bool copier_has_room() const {
    return copies_ - copies_ended_ < static_cast<uint64_t>(copier_->depth());
  }
  bool ends_at_once() const { return copier_->depth() == 1; }
  // Begins the next slot with the copies of these pieces; none are needed for a bare header.
  Status Begin(const std::vector<device::CopyPiece>& pieces, bool past_cache);
  // The payload bytes of a slot that is not older than the last ones of the ring.
  size_t bytes(uint64_t number) const { return entries_[number % entries_.size()].bytes; }

 private:
  struct Entry {
    uint64_t copy;  // how many copies must have ended
    size_t bytes;
  };

  std::unique_ptr<device::Copier> copier_;
  std::vector<Entry> entries_;
  uint64_t begun_ = 0;
  uint64_t ended_ = 0;
  uint64_t copies_ = 0;
  uint64_t copies_ended_ = 0;
};

}  // namespace hetccl::transport

#endif  // XLA_FFI_TRANSPORT_SLOT_COPIES_H_
