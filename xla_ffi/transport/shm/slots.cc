#include "xla_ffi/transport/shm/slots.h"

namespace hetccl::transport::shm {

Status Slots::Map(const UniqueFd& memfd, device::Space& space, device::Direction direction) {
  if (Status status = segment_.Map(memfd); !status.ok()) return status;
  Status status = space.Register(segment_.data(), segment_.size(), &memory_);
  if (!status.ok()) return status;
  entries_.resize(segment_.slots());
  return space.MakeCopier(direction, segment_.slot_bytes(), &copier_);
}

Status Slots::Begin(const std::vector<device::CopyPiece>& pieces, bool past_cache) {
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

Status Slots::Ended(uint64_t* ended) {
  if (Status status = copier_->Poll(&copies_ended_); !status.ok()) return status;
  while (ended_ < begun_ && entries_[ended_ % entries_.size()].copy <= copies_ended_) ++ended_;
  *ended = ended_;
  return Status();
}

}  // namespace hetccl::transport::shm
