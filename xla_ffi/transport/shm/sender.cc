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
  first_slot_ = slots_.begun();
  payload_ = SpanCursor<ConstSpan>(std::move(payload));
}

bool ShmSender::peer_has_begun() const {
  return slots_.control().freed.load(std::memory_order_relaxed) > first_slot_;
}

Status ShmSender::Room(uint64_t* room) const {
  const uint64_t slots = slots_.segment().slots();
  const uint64_t used = slots_.begun() - slots_.control().freed.load(std::memory_order_seq_cst);
  if (used > slots) {
    return Status(ErrorKind::kCorrupt, "the receiver freed shared memory that it did not have");
  }
  *room = slots - used;
  return Status();
}

Status ShmSender::Step(Progress* progress) {
  *progress = {};
  if (!busy_) return Status();
  if (link_.peer() != PeerState::kAlive) return Status();
  // A copier that ends at once gets one slot per step: the receiver empties it while the next is
  // filled, and other channels of this thread get their turn. Others get all that is free.
  while (more() && slots_.copier_has_room()) {
    uint64_t room = 0;
    if (Status status = Room(&room); !status.ok()) return status;
    if (room == 0) break;
    if (Status status = FillSlot(); !status.ok()) return status;
    if (slots_.ends_at_once()) break;
  }
  return Publish(progress);
}

Status ShmSender::FillSlot() {
  std::byte* slot = slots_.next();
  const uint64_t number = slots_.begun() - first_slot_;
  size_t offset = 0;
  if (header_pending_) {
    std::memcpy(slot, &header_, sizeof(header_));
    header_pending_ = false;
    offset = kPayloadOffset;
  }
  pieces_.clear();
  const size_t end =
      BytesInSlot(number, slots_.segment().slot_bytes(), offset + payload_.remaining());
  payload_.Take(end - offset, [&](const ConstSpan& from, size_t at) {
    pieces_.push_back({slot + offset + at, from.data, from.size});
  });
  return slots_.Begin(pieces_, /*past_cache=*/false);
}

Status ShmSender::Publish(Progress* progress) {
  uint64_t ended = 0;
  if (Status status = slots_.Ended(&ended); !status.ok()) return status;
  if (ended > published_) {
    for (; published_ < ended; ++published_) progress->bytes += slots_.bytes(published_);
    slots_.control().published.store(published_, std::memory_order_seq_cst);
    link_.Ring(&slots_.control().receiver_sleeps);
  }
  progress->copying = published_ < slots_.begun();
  progress->done = !more() && !progress->copying;
  busy_ = !progress->done;
  return Status();
}

bool ShmSender::ArmDoorbell() {
  link_.Read();
  if (!busy_ || link_.peer() != PeerState::kAlive) return true;
  slots_.control().sender_sleeps.store(1, std::memory_order_seq_cst);
  uint64_t room = 0;
  return !Room(&room).ok() || room > 0;
}

}  // namespace hetccl::transport::shm
