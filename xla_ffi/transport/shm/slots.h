// A channel's slots and the copies between them and the buffers of this side.
#ifndef XLA_FFI_TRANSPORT_SHM_SLOTS_H_
#define XLA_FFI_TRANSPORT_SHM_SLOTS_H_

#include <cstddef>
#include <memory>

#include "xla_ffi/device/space.h"
#include "xla_ffi/transport/shm/segment.h"
#include "xla_ffi/transport/slot_copies.h"

namespace hetccl::transport::shm {

namespace internal {
// Released after the copier that uses it.
struct SlotStorage {
  Segment segment_;
  std::unique_ptr<device::SlotMemory> memory_;  // before the segment is unmapped
};
}  // namespace internal

// One side's view of a segment. Used by one thread at a time.
class Slots : private internal::SlotStorage, public SlotCopies {
 public:
  // The segment is registered with the space, so that its copiers reach the slots directly.
  Status Map(const UniqueFd& memfd, device::Space& space, device::Direction direction) {
    if (Status status = segment_.Map(memfd); !status.ok()) return status;
    Status status = space.Register(segment_.data(), segment_.size(), &memory_);
    if (!status.ok()) return status;
    return Make(space, direction, segment_.slot_bytes(), segment_.slots());
  }

  const Segment& segment() const { return segment_; }
  Control& control() const { return segment_.control(); }
  std::byte* next() const { return segment_.slot(begun()); }
};

}  // namespace hetccl::transport::shm

#endif  // XLA_FFI_TRANSPORT_SHM_SLOTS_H_
