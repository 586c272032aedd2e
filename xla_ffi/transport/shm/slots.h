// A channel's slots and the copies between them and the buffers of this side.
#ifndef XLA_FFI_TRANSPORT_SHM_SLOTS_H_
#define XLA_FFI_TRANSPORT_SHM_SLOTS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "xla_ffi/device/space.h"
#include "xla_ffi/transport/shm/segment.h"

namespace hetccl::transport::shm {

// One side's view of a segment. Slots are begun in their order, each with one copy (or none), and
// end in that order. Used by one thread at a time.
class Slots {
 public:
  // The segment is registered with the space, so that its copiers reach the slots directly.
  Status Map(const UniqueFd& memfd, device::Space& space, device::Direction direction);

  const Segment& segment() const { return segment_; }
  Control& control() const { return segment_.control(); }
  // Slots begun, and those of them whose copy has ended, since the channel was made.
  uint64_t begun() const { return begun_; }
  Status Ended(uint64_t* ended);
  bool Quiet() { return copier_->Quiet(); }

  std::byte* next() const { return segment_.slot(begun_); }
  // Whether another copy is worth having under way.
  bool copier_has_room() const {
    return copies_ - copies_ended_ < static_cast<uint64_t>(copier_->depth());
  }
  bool ends_at_once() const { return copier_->depth() == 1; }
  // Begins the next slot with the copies of these pieces; none are needed for a bare header.
  Status Begin(const std::vector<device::CopyPiece>& pieces, bool past_cache);
  // The payload bytes of a slot that is not older than the last slots() ones.
  size_t bytes(uint64_t number) const { return entries_[number % entries_.size()].bytes; }

 private:
  struct Entry {
    uint64_t copy;  // how many copies must have ended
    size_t bytes;
  };

  Segment segment_;
  std::unique_ptr<device::SlotMemory> memory_;  // before the segment is unmapped
  std::unique_ptr<device::Copier> copier_;      // before the memory is released
  std::vector<Entry> entries_;
  uint64_t begun_ = 0;
  uint64_t ended_ = 0;
  uint64_t copies_ = 0;
  uint64_t copies_ended_ = 0;
};

}  // namespace hetccl::transport::shm

#endif  // XLA_FFI_TRANSPORT_SHM_SLOTS_H_
