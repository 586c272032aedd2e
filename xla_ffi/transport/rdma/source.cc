#include "xla_ffi/transport/rdma/source.h"

#include <algorithm>
#include <utility>

#include "xla_ffi/transport/rdma/device_slots.h"
#include "xla_ffi/transport/rdma/policy.h"

namespace hetccl::transport::rdma {

Status Source::Make(std::shared_ptr<Device> device, int paging, device::Space& space,
                    const Staging& staging) {
  device_ = std::move(device);
  spans_.Make(device_, paging);
  addressable_ = space.addressable();
  const size_t bytes = staging.slot_bytes * staging.slots;
  DeviceSlots on_device =
      MakeDeviceSlots(device_.get(), space, device::Direction::kOut, bytes, abi::kAccessLocalWrite);
  place_ = std::move(on_device.place);
  if (on_device.memory != nullptr) {
    ring_.Make(std::move(on_device.memory), std::move(on_device.copier), staging);
    slots_ = std::move(on_device.registration);
    return Status();
  }
  if (Status status = ring_.Make(space, device::Direction::kOut, staging); !status.ok()) {
    return status;
  }
  return device_->Register(ring_.slot(0), bytes, abi::kAccessLocalWrite, &slots_);
}

void Source::Begin(ConstPayload payload) {
  direct_ = addressable_ && WorthRegistering(payload);
  payload_ = SpanCursor<ConstSpan>(std::move(payload));
  unposted_ = payload_.remaining();
}

Status Source::Pump() {
  if (Status status = ring_.Poll(); !status.ok()) return status;
  while (!direct_ && payload_.remaining() > 0 && ring_.copier_has_room() &&
         ring_.copied_begun() - completed_slots_ < ring_.slots()) {
    std::byte* slot = ring_.slot(ring_.copied_begun());
    pieces_.clear();
    const size_t bytes =
        payload_.Take(ring_.slot_bytes(), [&](const ConstSpan& from, size_t offset) {
          pieces_.push_back({slot + offset, from.data, from.size});
        });
    ring_.length(ring_.copied_begun()) = bytes;
    if (Status status = ring_.Copy(pieces_); !status.ok()) return status;
    if (addressable_) CountCopied(bytes);
  }
  return ring_.Poll();
}

Status Source::Next(size_t limit, Piece* piece) {
  *piece = Piece();
  if (direct_ && payload_.remaining() > 0) {
    const ConstSpan front = payload_.Front();
    const Registration* registration = nullptr;
    size_t bytes = 0;
    if (spans_.Cover(front.data, front.size, &bytes, &registration).ok()) {
      *piece = {front.data, std::min(bytes, limit), registration->lkey(), false, false};
      return Status();
    }
    direct_ = false;  // most likely the limit of locked memory: a copy needs none
    if (Status status = Pump(); !status.ok()) return status;
  }
  if (posted_slots_ == ring_.copied()) return Status();
  const size_t left = ring_.length(posted_slots_) - posted_bytes_;
  *piece = {ring_.slot(posted_slots_) + posted_bytes_, std::min(left, limit), slots_->lkey(), true,
            left <= limit};
  return Status();
}

void Source::Posted(const Piece& piece) {
  unposted_ -= piece.bytes;
  if (!piece.staged) return payload_.Advance(piece.bytes);
  posted_bytes_ += piece.bytes;
  if (!piece.ends_slot) return;
  ++posted_slots_;
  posted_bytes_ = 0;
}

void Source::Completed(const Piece& piece) {
  if (piece.ends_slot) ++completed_slots_;
}

}  // namespace hetccl::transport::rdma
