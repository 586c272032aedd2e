#include "xla_ffi/transport/shm/receiver.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "xla_ffi/transport/shm/layout.h"

namespace hetccl::transport::shm {
namespace {

// Larger payloads are written past the cache: they would push everything else out of it.
constexpr size_t kStreamAbove = 8 << 20;

}  // namespace

PeerState ShmReceiver::peer() const {
  if (link_.peer() == PeerState::kAlive) return PeerState::kAlive;
  uint64_t filled = 0;
  const bool more = (Filled(&filled).ok() && filled > 0) || freed_ < slots_.begun();
  return more ? PeerState::kAlive : link_.peer();
}

Status ShmReceiver::Filled(uint64_t* filled) const {
  const uint64_t published = slots_.control().published.load(std::memory_order_seq_cst);
  if (published - freed_ > slots_.segment().slots()) {
    return Status(ErrorKind::kCorrupt, "the sender filled more shared memory than there is");
  }
  *filled = published - slots_.begun();
  return Status();
}

Status ShmReceiver::Peek(const WireHeader** header) {
  *header = nullptr;
  if (!have_header_) {
    uint64_t filled = 0;
    if (Status status = Filled(&filled); !status.ok()) return status;
    if (filled == 0) return Status();
    std::memcpy(&header_, slots_.next(), sizeof(header_));
    if (Status status = CheckHeader(header_); !status.ok()) return status;
    have_header_ = true;
  }
  *header = &header_;
  return Status();
}

void ShmReceiver::Accept(MutablePayload payload) {
  payload_ = SpanCursor<MutableSpan>(std::move(payload));
  in_first_slot_ = true;
  first_slot_ = slots_.begun();
  streaming_ = payload_.remaining() > kStreamAbove;
}

Status ShmReceiver::Step(Progress* progress) {
  *progress = {};
  while (more() && slots_.copier_has_room()) {
    uint64_t filled = 0;
    if (Status status = Filled(&filled); !status.ok()) return status;
    if (filled == 0) break;
    if (Status status = EmptySlot(); !status.ok()) return status;
    if (slots_.ends_at_once()) break;  // see ShmSender::Step
  }
  return Free(progress);
}

Status ShmReceiver::EmptySlot() {
  const std::byte* slot = slots_.next();
  const uint64_t number = slots_.begun() - first_slot_;
  const size_t offset = in_first_slot_ ? kPayloadOffset : 0;
  in_first_slot_ = false;
  const size_t end =
      BytesInSlot(number, slots_.segment().slot_bytes(), offset + payload_.remaining());
  pieces_.clear();
  payload_.Take(end - offset, [&](const MutableSpan& to, size_t at) {
    pieces_.push_back({to.data, slot + offset + at, to.size});
  });
  return slots_.Begin(pieces_, streaming_);
}

Status ShmReceiver::Free(Progress* progress) {
  uint64_t ended = 0;
  if (Status status = slots_.Ended(&ended); !status.ok()) return status;
  if (ended > freed_) {
    for (; freed_ < ended; ++freed_) progress->bytes += slots_.bytes(freed_);
    slots_.control().freed.store(freed_, std::memory_order_seq_cst);
    link_.Ring(&slots_.control().sender_sleeps);
  }
  progress->copying = freed_ < slots_.begun();
  progress->done = !more() && !progress->copying;
  if (progress->done) have_header_ = false;
  return Status();
}

bool ShmReceiver::ArmDoorbell() {
  link_.Read();
  if (peer() != PeerState::kAlive) return true;
  slots_.control().receiver_sleeps.store(1, std::memory_order_seq_cst);
  uint64_t filled = 0;
  return !Filled(&filled).ok() || filled > 0;
}

}  // namespace hetccl::transport::shm
