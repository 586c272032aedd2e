#include "xla_ffi/transport/shm/receiver.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "xla_ffi/common/copy.h"
#include "xla_ffi/transport/shm/layout.h"

namespace hetccl::transport::shm {
namespace {

// Larger payloads are written past the cache: they would push everything else out of it.
constexpr size_t kStreamAbove = 8 << 20;

}  // namespace

PeerState ShmReceiver::peer() const {
  if (link_.peer() == PeerState::kAlive) return PeerState::kAlive;
  uint64_t filled = 0;
  const bool more = Filled(&filled).ok() && filled > 0;
  return more ? PeerState::kAlive : link_.peer();
}

Status ShmReceiver::Filled(uint64_t* filled) const {
  *filled = segment_.control().published.load(std::memory_order_seq_cst) - freed_;
  if (*filled > segment_.slots()) {
    return Status(ErrorKind::kCorrupt, "the sender filled more shared memory than there is");
  }
  return Status();
}

Status ShmReceiver::Peek(const WireHeader** header) {
  *header = nullptr;
  if (!have_header_) {
    uint64_t filled = 0;
    if (Status status = Filled(&filled); !status.ok()) return status;
    if (filled == 0) return Status();
    std::memcpy(&header_, segment_.slot(freed_), sizeof(header_));
    if (Status status = CheckHeader(header_); !status.ok()) return status;
    have_header_ = true;
  }
  *header = &header_;
  return Status();
}

void ShmReceiver::Accept(MutablePayload payload) {
  payload_ = SpanCursor<MutableSpan>(std::move(payload));
  in_first_slot_ = true;
  streaming_ = payload_.remaining() > kStreamAbove;
}

Status ShmReceiver::Step(Progress* progress) {
  *progress = {};
  uint64_t filled = 0;
  if (Status status = Filled(&filled); !status.ok()) return status;
  if (filled == 0) return Status();
  const std::byte* slot = segment_.slot(freed_);
  size_t offset = in_first_slot_ ? kPayloadOffset : 0;
  in_first_slot_ = false;
  while (offset < segment_.slot_bytes() && payload_.remaining() > 0) {
    const MutableSpan to = payload_.Front();
    const size_t bytes = std::min(to.size, segment_.slot_bytes() - offset);
    if (streaming_) {
      CopyStreaming(to.data, slot + offset, bytes);
    } else {
      std::memcpy(to.data, slot + offset, bytes);
    }
    payload_.Advance(bytes);
    offset += bytes;
    progress->bytes += bytes;
  }
  FreeSlot();
  progress->done = payload_.remaining() == 0;
  if (progress->done) have_header_ = false;
  return Status();
}

void ShmReceiver::FreeSlot() {
  segment_.control().freed.store(++freed_, std::memory_order_seq_cst);
  link_.Ring(&segment_.control().sender_sleeps);
}

bool ShmReceiver::ArmDoorbell() {
  link_.Read();
  if (peer() != PeerState::kAlive) return true;
  segment_.control().receiver_sleeps.store(1, std::memory_order_seq_cst);
  uint64_t filled = 0;
  return !Filled(&filled).ok() || filled > 0;
}

}  // namespace hetccl::transport::shm
