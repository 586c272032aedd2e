#include "xla_ffi/transport/shm/sender.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "xla_ffi/transport/shm/layout.h"

namespace hetccl::transport::shm {

void ShmSender::Begin(const WireHeader& header, ConstPayload payload) {
  header_ = header;
  header_pending_ = true;
  busy_ = true;
  first_slot_ = published_;
  payload_ = SpanCursor<ConstSpan>(std::move(payload));
}

bool ShmSender::peer_has_begun() const {
  return segment_.control().freed.load(std::memory_order_relaxed) > first_slot_;
}

Status ShmSender::Room(uint64_t* room) const {
  const uint64_t used = published_ - segment_.control().freed.load(std::memory_order_seq_cst);
  if (used > segment_.slots()) {
    return Status(ErrorKind::kCorrupt, "the receiver freed shared memory that it did not have");
  }
  *room = segment_.slots() - used;
  return Status();
}

Status ShmSender::Step(Progress* progress) {
  *progress = {};
  if (!busy_) return Status();
  uint64_t room = 0;
  if (Status status = Room(&room); !status.ok()) return status;
  if (room == 0 || link_.peer() != PeerState::kAlive) return Status();
  // One slot per step: the receiver empties it while the next is filled, and other channels of this
  // thread get their turn.
  std::byte* slot = segment_.slot(published_);
  size_t offset = 0;
  if (header_pending_) {
    std::memcpy(slot, &header_, sizeof(header_));
    header_pending_ = false;
    offset = kPayloadOffset;
  }
  while (offset < segment_.slot_bytes() && payload_.remaining() > 0) {
    const ConstSpan from = payload_.Front();
    const size_t bytes = std::min(from.size, segment_.slot_bytes() - offset);
    std::memcpy(slot + offset, from.data, bytes);
    payload_.Advance(bytes);
    offset += bytes;
    progress->bytes += bytes;
  }
  segment_.control().published.store(++published_, std::memory_order_seq_cst);
  link_.Ring(&segment_.control().receiver_sleeps);
  progress->done = payload_.remaining() == 0;
  busy_ = !progress->done;
  return Status();
}

bool ShmSender::ArmDoorbell() {
  link_.Read();
  if (!busy_ || link_.peer() != PeerState::kAlive) return true;
  segment_.control().sender_sleeps.store(1, std::memory_order_seq_cst);
  uint64_t room = 0;
  return !Room(&room).ok() || room > 0;
}

}  // namespace hetccl::transport::shm
