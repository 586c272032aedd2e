#include "xla_ffi/transport/slot_copies.h"

#include <utility>

namespace hetccl::transport {

Status SlotCopies::Make(device::Space& space, device::Direction direction, size_t slot_bytes,
                        uint64_t slots) {
  entries_.resize(slots);
  return space.MakeCopier(direction, slot_bytes, &copier_);
}

void SlotCopies::Make(std::unique_ptr<device::Copier> copier, uint64_t slots) {
  entries_.resize(slots);
  copier_ = std::move(copier);
}

Status SlotCopies::Begin(const std::vector<device::CopyPiece>& pieces, bool past_cache) {
  size_t bytes = 0;
  for (const device::CopyPiece& piece : pieces) bytes += piece.bytes;
  if (bytes > 0) {
    Status status = copier_->Submit(pieces.data(), pieces.size(), past_cache);
    if (!status.ok()) return status;
    ++copies_;
  }
  entries_[begun_ % entries_.size()] = {copies_, bytes};
  ++begun_;
  return Status();
}

Status SlotCopies::Ended(uint64_t* ended) {
  if (Status status = copier_->Poll(&copies_ended_); !status.ok()) return status;
  while (ended_ < begun_ && entries_[ended_ % entries_.size()].copy <= copies_ended_) ++ended_;
  *ended = ended_;
  return Status();
}

}  // namespace hetccl::transport
