#include "xla_ffi/transport/staged_window.h"

#include <algorithm>
#include <utility>

namespace hetccl::transport {
namespace {

template <typename Direct, typename Staged, typename Interface>
Status Make(device::Space& space, const Staging& staging, std::unique_ptr<Interface>* out) {
  if (space.addressable()) {
    *out = std::make_unique<Direct>();
    return Status();
  }
  auto window = std::make_unique<Staged>();
  if (Status status = window->Make(space, staging); !status.ok()) return status;
  *out = std::move(window);
  return Status();
}

}  // namespace

Status MakeWindow(device::Space& space, const Staging& staging, std::unique_ptr<SendWindow>* out) {
  return Make<DirectWindow<ConstSpan>, StagedSendWindow>(space, staging, out);
}

Status MakeWindow(device::Space& space, const Staging& staging,
                  std::unique_ptr<ReceiveWindow>* out) {
  return Make<DirectWindow<MutableSpan>, StagedReceiveWindow>(space, staging, out);
}

Status StagingRing::Make(device::Space& space, device::Direction direction,
                         const Staging& staging) {
  slot_bytes_ = staging.slot_bytes;
  lengths_.resize(staging.slots);
  Status status = space.Allocate(staging.slot_bytes * staging.slots, &memory_);
  if (!status.ok()) return status;
  return space.MakeCopier(direction, staging.slot_bytes, &copier_);
}

void StagingRing::Make(std::unique_ptr<device::SlotMemory> memory,
                       std::unique_ptr<device::Copier> copier, const Staging& staging) {
  slot_bytes_ = staging.slot_bytes;
  lengths_.resize(staging.slots);
  memory_ = std::move(memory);
  copier_ = std::move(copier);
}

Status StagingRing::Copy(const std::vector<device::CopyPiece>& pieces) {
  Status status = copier_->Submit(pieces.data(), pieces.size(), /*past_cache=*/false);
  if (status.ok()) ++copied_begun_;
  return status;
}

void StagedSendWindow::Begin(std::vector<ConstSpan> payload) {
  payload_ = SpanCursor<ConstSpan>(std::move(payload));
}

Status StagedSendWindow::Pump() {
  if (Status status = ring_.Poll(); !status.ok()) return status;
  while (payload_.remaining() > 0 && ring_.copier_has_room() &&
         ring_.copied_begun() - sent_ < ring_.slots()) {
    std::byte* slot = ring_.slot(ring_.copied_begun());
    pieces_.clear();
    ring_.length(ring_.copied_begun()) =
        payload_.Take(ring_.slot_bytes(), [&](const ConstSpan& from, size_t offset) {
          pieces_.push_back({slot + offset, from.data, from.size});
        });
    if (Status status = ring_.Copy(pieces_); !status.ok()) return status;
  }
  return ring_.Poll();
}

int StagedSendWindow::Gather(size_t limit, iovec* out, int capacity) const {
  int count = 0;
  size_t offset = sent_bytes_;
  for (uint64_t n = sent_; n < ring_.copied() && count < capacity && limit > 0; ++n, offset = 0) {
    const size_t bytes = std::min(limit, ring_.length(n) - offset);
    out[count++] = {ring_.slot(n) + offset, bytes};
    limit -= bytes;
  }
  return count;
}

void StagedSendWindow::Advance(size_t bytes) {
  while (bytes > 0) {
    const size_t step = std::min(bytes, ring_.length(sent_) - sent_bytes_);
    bytes -= step;
    sent_bytes_ += step;
    if (sent_bytes_ < ring_.length(sent_)) return;
    ++sent_;
    sent_bytes_ = 0;
  }
}

void StagedReceiveWindow::Begin(std::vector<MutableSpan> payload) {
  payload_ = SpanCursor<MutableSpan>(std::move(payload));
  unreceived_ = payload_.remaining();
}

Status StagedReceiveWindow::Pump() {
  if (Status status = ring_.Poll(); !status.ok()) return status;
  while (ring_.copied_begun() < filled_ && ring_.copier_has_room()) {
    const std::byte* slot = ring_.slot(ring_.copied_begun());
    pieces_.clear();
    payload_.Take(ring_.length(ring_.copied_begun()), [&](const MutableSpan& to, size_t offset) {
      pieces_.push_back({to.data, slot + offset, to.size});
    });
    if (Status status = ring_.Copy(pieces_); !status.ok()) return status;
  }
  return ring_.Poll();
}

int StagedReceiveWindow::Gather(size_t limit, iovec* out, int capacity) const {
  int count = 0;
  size_t offset = filled_bytes_;
  size_t left = std::min(limit, unreceived_);
  for (uint64_t n = filled_; n - ring_.copied() < ring_.slots() && count < capacity && left > 0;
       ++n, offset = 0) {
    const size_t bytes = std::min(left, ring_.slot_bytes() - offset);
    out[count++] = {ring_.slot(n) + offset, bytes};
    left -= bytes;
  }
  return count;
}

void StagedReceiveWindow::Advance(size_t bytes) {
  while (bytes > 0) {
    const size_t step = std::min(bytes, ring_.slot_bytes() - filled_bytes_);
    bytes -= step;
    unreceived_ -= step;
    filled_bytes_ += step;
    if (filled_bytes_ < ring_.slot_bytes() && unreceived_ > 0) return;
    ring_.length(filled_) = filled_bytes_;
    ++filled_;
    filled_bytes_ = 0;
  }
}

}  // namespace hetccl::transport
