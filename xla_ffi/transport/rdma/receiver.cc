#include "xla_ffi/transport/rdma/receiver.h"

#include <algorithm>
#include <cstring>

#include "xla_ffi/transport/rdma/policy.h"

namespace hetccl::transport::rdma {
namespace {

// Credits, grants, and a word that slots are to be used.
constexpr uint32_t kReceiverWrites = 64;
// Two for a run of grants that wraps around, one for a credit, one to say that slots are used.
constexpr size_t kKeptRoom = 4;
// A credit for each slot would be a packet for each; fewer than this many slots wait for one.
constexpr uint64_t kCreditFraction = 4;

}  // namespace

Status RdmaReceiver::Open(device::Space& space, const Staging& staging) {
  EndpointRecord mine;
  mine.role = Role::kReceiver;
  if (Status status = Allocate(space, staging, &mine); !status.ok()) {
    line_.Refuse(Role::kReceiver, status);
    return status;
  }
  return line_.Meet(mine, &board_.unused, board_registration_->lkey());
}

Status RdmaReceiver::Allocate(device::Space& space, const Staging& staging, EndpointRecord* mine) {
  addressable_ = space.addressable();
  space_ = &space;
  slot_bytes_ = addressable_ ? std::min(staging.slot_bytes, kHostSlotBytes) : staging.slot_bytes;
  const auto slots = static_cast<uint32_t>(staging.slots);
  if (Status status = line_.Open({kReceiverWrites, slots + kGrants + 1}, mine); !status.ok()) {
    return status;
  }
  const size_t bytes = slot_bytes_ * slots;
  if (Status status = space.Allocate(bytes, &memory_); !status.ok()) return status;
  Device& device = *line_.device();
  Status status =
      device.Register(memory_->data(), bytes, abi::kAccessLocalWrite | abi::kAccessRemoteWrite,
                      &slots_registration_);
  if (!status.ok()) return status;
  status = device.Register(&board_, sizeof(board_), abi::kAccessLocalWrite, &board_registration_);
  if (!status.ok()) return status;
  mine->address = reinterpret_cast<uint64_t>(memory_->data());
  mine->rkey = slots_registration_->rkey();
  mine->slot_bytes = static_cast<uint32_t>(slot_bytes_);
  mine->slots = slots;
  device_slots_ = MakeDeviceSlots(&device, space, device::Direction::kIn, bytes,
                                  abi::kAccessLocalWrite | abi::kAccessRemoteWrite);
  if (addressable_ || on_device()) mine->flags |= kGrantsMemory;
  spans_.Make(line_.device(), abi::kAccessLocalWrite | abi::kAccessRemoteWrite | line_.paging());
  if (addressable_ && line_.paging() != 0) mine->flags |= kPagesOnDemand;
  if (on_device()) device_copies_.Make(std::move(device_slots_.copier), slots);
  return copies_.Make(space, device::Direction::kIn, slot_bytes_, slots);
}

Route RdmaReceiver::route() const {
  return line_.RouteWith(device_slots_.place, addressable_,
                         copied_.load(std::memory_order_relaxed));
}

PeerState RdmaReceiver::peer() const {
  if (line_.link().peer() == PeerState::kAlive) return PeerState::kAlive;
  const bool more = !arrived_.empty() || freed_ < copies_.begun() || direct_bytes_ > 0 ||
                    (on_device() && device_copies_.begun() < filled_);
  return more ? PeerState::kAlive : line_.link().peer();
}

Status RdmaReceiver::Poll() {
  if (Status status = line_.Poll(&completed_); !status.ok()) return status;
  for (const Completion& completion : completed_) {
    if (!completion.receive) continue;
    if (Status status = Take(completion.immediate); !status.ok()) return status;
  }
  return Status();
}

Status RdmaReceiver::Take(uint32_t immediate) {
  switch (KindOf(immediate)) {
    case Immediate::kMessage:
    case Immediate::kHeader:
    case Immediate::kChunk:
      if (arrived_.size() + (copies_.begun() - credited_) >= line_.slots()) {
        return Status(ErrorKind::kCorrupt, "the sender filled more slots than there are");
      }
      arrived_.push_back(immediate);
      return Status();
    case Immediate::kDirect: {
      if (filled_ == granted_) {
        return Status(ErrorKind::kCorrupt, "the sender filled memory that it was not granted");
      }
      const size_t bytes = board_.grants[filled_++ % kGrants].bytes;
      unfilled_ -= bytes;
      if (!on_device()) direct_bytes_ += bytes;  // else it is still to be copied
      return Status();
    }
    default:
      return Status(ErrorKind::kCorrupt, "the sender sent an unknown immediate");
  }
}

Status RdmaReceiver::Peek(const WireHeader** header) {
  *header = nullptr;
  if (!have_header_) {
    if (Status status = Poll(); !status.ok()) return status;
    if (arrived_.empty()) return Status();
    const Immediate kind = KindOf(arrived_.front());
    if (kind != Immediate::kMessage && kind != Immediate::kHeader) {
      return Status(ErrorKind::kCorrupt, "a message does not begin with a header");
    }
    std::memcpy(&header_, slot(copies_.begun()), sizeof(header_));
    if (Status status = CheckHeader(header_); !status.ok()) return status;
    if (kind == Immediate::kMessage && header_.payload_bytes > slot_bytes_ - kPayloadOffset) {
      return Status(ErrorKind::kCorrupt, "a message is longer than its slot");
    }
    have_header_ = true;
  }
  *header = &header_;
  return Status();
}

void RdmaReceiver::Accept(MutablePayload payload) {
  offering_ = on_device() || (addressable_ && WorthRegistering(payload));
  payload_ = SpanCursor<MutableSpan>(std::move(payload));
  use_slots_pending_ = false;
}

Status RdmaReceiver::Step(Progress* progress) {
  *progress = {};
  if (Status status = Poll(); !status.ok()) return status;
  if (!accepted_) {
    const bool whole = KindOf(arrived_.front()) == Immediate::kMessage;
    const size_t bytes = whole ? payload_.remaining() : 0;
    if (whole) {
      offering_ = false;
    } else {
      // Something follows, so the sender wants to know that it has been taken on.
      credit_at_once_ = !addressable_ && !on_device();
      use_slots_pending_ = addressable_ && !offering_;
      unoffered_ = payload_.remaining();
    }
    arrived_.pop_front();
    if (Status status = EmptySlot(kPayloadOffset, bytes); !status.ok()) return status;
    accepted_ = true;
  }
  if (Status status = Offer(); !status.ok()) return status;
  if (Status status = EmptyDeviceSlots(); !status.ok()) return status;
  if (Status status = EmptyChunks(); !status.ok()) return status;
  return Free(progress);
}

Status RdmaReceiver::EmptyChunks() {
  while (!arrived_.empty() && payload_.remaining() > 0 && !offering_ && copies_.copier_has_room()) {
    if (KindOf(arrived_.front()) != Immediate::kChunk) {
      return Status(ErrorKind::kCorrupt, "a message begins before the one before has ended");
    }
    const size_t bytes = ValueOf(arrived_.front());
    if (bytes != std::min(slot_bytes_, payload_.remaining())) {
      return Status(ErrorKind::kCorrupt, "a slot does not hold what is left of the message");
    }
    arrived_.pop_front();
    if (Status status = EmptySlot(0, bytes); !status.ok()) return status;
    if (copies_.ends_at_once()) break;
  }
  return Status();
}

Status RdmaReceiver::EmptySlot(size_t offset, size_t bytes) {
  const std::byte* from = slot(copies_.begun()) + offset;
  pieces_.clear();
  payload_.Take(bytes, [&](const MutableSpan& to, size_t at) {
    pieces_.push_back({to.data, from + at, to.size});
  });
  if (addressable_) copied_.fetch_add(bytes, std::memory_order_relaxed);
  return copies_.Begin(pieces_, /*past_cache=*/false);
}

Status RdmaReceiver::Offer() {
  const uint64_t begin = granted_;
  if (offering_ && on_device()) {
    OfferDeviceSlots();
  } else if (offering_) {
    OfferPayload();
  }
  if (Status status = PostGrants(begin, granted_); !status.ok()) return status;
  return use_slots_pending_ && line_.queue_pair().room() > 1 ? TellToUseSlots() : Status();
}

void RdmaReceiver::OfferPayload() {
  while (payload_.remaining() > 0 && granted_ - filled_ < kGrants &&
         line_.queue_pair().room() > kKeptRoom) {
    const MutableSpan front = payload_.Front();
    size_t bytes = 0;
    const Registration* registration = nullptr;
    if (!spans_.Cover(front.data, front.size, &bytes, &registration).ok()) {
      offering_ = false;
      use_slots_pending_ = true;
      return;
    }
    bytes = std::min(bytes, kGrantBytes);
    AddGrant(front.data, registration->rkey(), bytes);
    payload_.Advance(bytes);
  }
}

void RdmaReceiver::OfferDeviceSlots() {
  while (unoffered_ > 0 && granted_ - filled_ < kGrants &&
         granted_ - device_emptied_ < line_.slots() && line_.queue_pair().room() > kKeptRoom) {
    const size_t bytes = std::min(unoffered_, slot_bytes_);
    AddGrant(device_slot(granted_), device_slots_.registration->rkey(), bytes);
    unoffered_ -= bytes;
  }
}

void RdmaReceiver::AddGrant(const void* data, uint32_t rkey, size_t bytes) {
  board_.grants[granted_++ % kGrants] = {reinterpret_cast<uint64_t>(data), rkey,
                                         static_cast<uint32_t>(bytes)};
  unfilled_ += bytes;
}

Status RdmaReceiver::TellToUseSlots() {
  use_slots_pending_ = false;
  Write write = {&board_, board_registration_->lkey(), 0, line_.theirs().address,
                 line_.theirs().rkey};
  write.has_immediate = true;
  write.immediate = Pack(Immediate::kUseSlots, 0);
  return line_.queue_pair().Post(write);
}

Status RdmaReceiver::EmptyDeviceSlots() {
  if (!on_device() || device_copies_.begun() == filled_) return Status();
  if (Status status = space_->OrderRemoteWrites(); !status.ok()) return status;
  while (device_copies_.begun() < filled_ && device_copies_.copier_has_room()) {
    const std::byte* from = device_slot(device_copies_.begun());
    pieces_.clear();
    payload_.Take(slot_bytes_, [&](const MutableSpan& to, size_t at) {
      pieces_.push_back({to.data, from + at, to.size});
    });
    if (Status status = device_copies_.Begin(pieces_, /*past_cache=*/false); !status.ok()) {
      return status;
    }
  }
  return Status();
}

Status RdmaReceiver::PostGrants(uint64_t begin, uint64_t end) {
  while (begin < end) {
    const uint64_t run = std::min(end - begin, kGrants - begin % kGrants);
    const size_t offset = offsetof(SenderBoard, grants) + begin % kGrants * sizeof(Grant);
    Write write = {reinterpret_cast<const std::byte*>(&board_) + offset,
                   board_registration_->lkey(), run * sizeof(Grant),
                   line_.theirs().address + offset, line_.theirs().rkey};
    write.has_immediate = true;
    write.immediate = Pack(Immediate::kGrant, run);
    if (Status status = line_.queue_pair().Post(write); !status.ok()) return status;
    begin += run;
  }
  return Status();
}

Status RdmaReceiver::Free(Progress* progress) {
  uint64_t ended = 0;
  if (Status status = copies_.Ended(&ended); !status.ok()) return status;
  for (; freed_ < ended; ++freed_) progress->bytes += copies_.bytes(freed_);
  progress->bytes += std::exchange(direct_bytes_, 0);
  progress->copying = freed_ < copies_.begun();
  if (on_device()) {
    if (Status status = device_copies_.Ended(&ended); !status.ok()) return status;
    for (; device_emptied_ < ended; ++device_emptied_) {
      progress->bytes += device_copies_.bytes(device_emptied_);
    }
    progress->copying |= device_emptied_ < device_copies_.begun();
  }
  progress->done = payload_.remaining() == 0 && unfilled_ == 0 && !progress->copying;
  if (progress->done) {
    have_header_ = accepted_ = offering_ = false;
    spans_.Release();
  }
  return SendCredit();
}

Status RdmaReceiver::SendCredit() {
  const uint64_t pending = freed_ - credited_;
  if (pending == 0 || line_.queue_pair().room() < 2) return Status();
  if (!credit_at_once_ && pending < std::max<uint64_t>(1, line_.slots() / kCreditFraction)) {
    return Status();
  }
  credit_at_once_ = false;
  credited_ = freed_;
  board_.freed = freed_;
  Write write = {&board_.freed, board_registration_->lkey(), sizeof(board_.freed),
                 line_.theirs().address, line_.theirs().rkey};
  write.has_immediate = true;
  write.immediate = Pack(Immediate::kCredit, freed_);
  return line_.queue_pair().Post(write);
}

bool RdmaReceiver::ArmDoorbell() {
  if (!line_.queue_pair().Arm().ok() || line_.link().peer() != PeerState::kAlive) return true;
  const size_t before = arrived_.size();
  // An error shows again in the next step.
  if (!Poll().ok()) return true;
  return arrived_.size() != before || direct_bytes_ > 0 ||
         (on_device() && device_copies_.begun() < filled_);
}

bool RdmaReceiver::Quiet() {
  if (!line_.Quiet()) return false;
  spans_.Abandon();
  return copies_.Quiet() && (!on_device() || device_copies_.Quiet());
}

}  // namespace hetccl::transport::rdma
