#include "xla_ffi/transport/rdma/sender.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "xla_ffi/transport/rdma/policy.h"

namespace hetccl::transport::rdma {
namespace {

constexpr uint32_t kSenderWrites = 128;
// A payload of many spans has many writes for each grant, which must not fill the queue.
constexpr uint32_t kTellEvery = 16;
// One step gives the NIC no more, so that other channels of the thread get their turn.
constexpr int kWritesInStep = 16;

}  // namespace

RdmaSender::~RdmaSender() {
  SendGoodbye();
  line_.Close();
}

Status RdmaSender::Open(device::Space& space, const Staging& staging) {
  EndpointRecord mine;
  mine.role = Role::kSender;
  if (Status status = Allocate(space, staging, &mine); !status.ok()) {
    line_.Refuse(Role::kSender, status);
    return status;
  }
  return line_.Meet(mine, &board_.unused, board_registration_->lkey());
}

Status RdmaSender::Allocate(device::Space& space, const Staging& staging, EndpointRecord* mine) {
  mine->slots = static_cast<uint32_t>(staging.slots);
  const uint32_t receives = static_cast<uint32_t>(2 * staging.slots) + kGrants + 2;
  Status status = line_.Open({kSenderWrites, receives}, mine);
  if (!status.ok()) return status;
  status = line_.device()->Register(&board_, sizeof(board_),
                                    abi::kAccessLocalWrite | abi::kAccessRemoteWrite,
                                    &board_registration_);
  if (!status.ok()) return status;
  outgoing_.resize(staging.slots);
  status = line_.device()->Register(outgoing_.data(), outgoing_.size() * sizeof(Outgoing),
                                    abi::kAccessLocalWrite, &outgoing_registration_);
  if (!status.ok()) return status;
  mine->address = reinterpret_cast<uint64_t>(&board_);
  mine->rkey = board_registration_->rkey();
  Staging slots = staging;
  if (space.addressable()) slots.slot_bytes = std::min(slots.slot_bytes, kHostSlotBytes);
  return source_.Make(line_.device(), line_.paging(), space, slots);
}

Route RdmaSender::route() const {
  return line_.RouteWith(source_.place(), source_.addressable(), source_.copied());
}

PeerState RdmaSender::peer() const {
  const PeerState state = line_.link().peer();
  // A peer that has all of the message may leave before this side sees that its writes have ended.
  const bool ending = stage_ == Stage::kPayload && source_.remaining() == 0 && reading_ > 0 &&
                      !line_.failed();  // else they never end
  return state == PeerState::kGoodbye && ending ? PeerState::kAlive : state;
}

uint64_t RdmaSender::slot_address(uint64_t number) const {
  const EndpointRecord& theirs = line_.theirs();
  return theirs.address + number % line_.slots() * theirs.slot_bytes;
}

void RdmaSender::Begin(const WireHeader& header, ConstPayload payload) {
  const EndpointRecord& theirs = line_.theirs();
  const bool grants = (theirs.flags & kGrantsMemory) != 0;
  const size_t total = TotalSize(payload);
  header_ = header;
  whole_ = kPayloadOffset + total <= theirs.slot_bytes && (!grants || total < kDirectFrom);
  use_slots_ = !grants;
  ungranted_ = grants && !whole_ ? total : 0;
  peer_has_begun_ = false;
  first_slot_ = sent_slots_;
  in_target_ = 0;
  stage_ = Stage::kHeader;
  tiny_.clear();
  if (source_.addressable() && total <= kTinyBytes) {
    tiny_ = std::move(payload);
    payload.clear();
  }
  source_.Begin(std::move(payload));
}

Status RdmaSender::Poll(Progress* progress) {
  if (Status status = line_.Poll(&completed_); !status.ok()) return status;
  for (const Completion& completion : completed_) {
    if (completion.receive) {
      if (Status status = Take(completion.immediate); !status.ok()) return status;
      continue;
    }
    for (uint64_t i = 0; i < completion.writes; ++i) {
      const Piece piece = in_flight_.front();
      in_flight_.pop_front();
      source_.Completed(piece);
      if (piece.bytes == 0 || piece.staged) continue;
      --reading_;
      progress->bytes += piece.bytes;
    }
  }
  return Status();
}

Status RdmaSender::Take(uint32_t immediate) {
  switch (KindOf(immediate)) {
    case Immediate::kCredit:
      return TakeCredit(ValueOf(immediate));
    case Immediate::kGrant:
      return TakeGrants(ValueOf(immediate));
    case Immediate::kUseSlots:
      use_slots_ = peer_has_begun_ = true;
      return Status();
    default:
      return Status(ErrorKind::kCorrupt, "the receiver sent an unknown immediate");
  }
}

Status RdmaSender::TakeCredit(uint32_t value) {
  const uint64_t freed = freed_ + ((value - static_cast<uint32_t>(freed_)) & kValueMask);
  if (freed > sent_slots_) {
    return Status(ErrorKind::kCorrupt, "the receiver freed slots that it did not have");
  }
  freed_ = freed;
  peer_has_begun_ |= freed_ > first_slot_;
  return Status();
}

Status RdmaSender::TakeGrants(uint32_t count) {
  if (count > kGrants - std::min<size_t>(kGrants, grants_.size()) || stage_ == Stage::kIdle) {
    return Status(ErrorKind::kCorrupt, "the receiver granted more memory than it may");
  }
  for (uint32_t i = 0; i < count; ++i) {
    const Grant grant = board_.grants[grants_taken_++ % kGrants];
    if (grant.bytes == 0) return Status(ErrorKind::kCorrupt, "the receiver granted no memory");
    if (grant.bytes > ungranted_) {
      return Status(ErrorKind::kCorrupt, "the receiver granted more memory than the message fills");
    }
    ungranted_ -= grant.bytes;
    grants_.push_back(grant);
  }
  peer_has_begun_ = true;
  return Status();
}

Status RdmaSender::Step(Progress* progress) {
  *progress = {};
  if (Status status = Poll(progress); !status.ok()) return status;
  progress->bytes += std::exchange(earlier_bytes_, 0);
  if (stage_ == Stage::kIdle) return Status();
  if (line_.link().peer() == PeerState::kAlive) {
    if (Status status = PostAll(progress); !status.ok()) return status;
  }
  progress->copying = source_.copying();
  progress->done = stage_ == Stage::kPayload && source_.remaining() == 0 && reading_ == 0;
  if (progress->done) {
    if (!grants_.empty()) {
      return Status(ErrorKind::kCorrupt,
                    "the receiver granted memory for bytes that came in slots");
    }
    stage_ = Stage::kIdle;
    source_.Release();
  }
  return Status();
}

Status RdmaSender::PostAll(Progress* progress) {
  if (Status status = source_.Pump(); !status.ok()) return status;
  for (int i = 0; i < kWritesInStep && line_.queue_pair().room() > 1; ++i) {
    bool posted = false;
    if (Status status = PostNext(progress, &posted); !status.ok()) return status;
    if (!posted) break;
  }
  return Status();
}

Status RdmaSender::PostNext(Progress* progress, bool* posted) {
  if (stage_ == Stage::kHeader) {
    if (!has_slot()) return Status();
    if (!whole_) return PostHeader(/*whole=*/false, progress, posted);
    if (source_.remaining() == 0) return PostHeader(/*whole=*/true, progress, posted);
    Target behind_header;
    behind_header.address = slot_address(sent_slots_) + kPayloadOffset + in_target_;
    behind_header.bytes = source_.remaining();
    behind_header.rkey = line_.theirs().rkey;
    return PostPiece(behind_header, /*last_has_immediate=*/false, progress, posted);
  }
  if (source_.remaining() == 0) return Status();
  const Target target = NextTarget();
  if (target.bytes == 0) return Status();
  if (Status status = PostPiece(target, true, progress, posted); !status.ok()) return status;
  return Status();
}

Status RdmaSender::PostHeader(bool whole, Progress* progress, bool* posted) {
  Outgoing& out = outgoing(sent_slots_);
  out.header = header_;
  size_t tiny = 0;
  for (const ConstSpan& span : tiny_) {
    std::memcpy(out.payload + tiny, span.data, span.size);
    tiny += span.size;
  }
  source_.CountCopied(tiny);
  Write write = {&out, outgoing_registration_->lkey(), sizeof(out.header) + tiny,
                 slot_address(sent_slots_), line_.theirs().rkey};
  write.has_immediate = true;
  write.immediate = Pack(whole ? Immediate::kMessage : Immediate::kHeader, 0);
  if (Status status = PostWrite(write, Piece()); !status.ok()) return status;
  ++sent_slots_;
  in_target_ = 0;
  stage_ = Stage::kPayload;
  progress->bytes += tiny;
  *posted = true;
  return Status();
}

RdmaSender::Target RdmaSender::NextTarget() const {
  Target target;
  if (!grants_.empty()) {
    target = {grants_.front().address, grants_.front().bytes, grants_.front().rkey,
              Immediate::kDirect, static_cast<uint32_t>(grants_filled_ & kValueMask)};
  } else if (use_slots_ && has_slot()) {
    const size_t bytes =
        std::min<size_t>(line_.theirs().slot_bytes, in_target_ + source_.remaining());
    target = {slot_address(sent_slots_), bytes, line_.theirs().rkey, Immediate::kChunk,
              static_cast<uint32_t>(bytes)};
  }
  target.address += in_target_;
  target.bytes -= std::min(target.bytes, in_target_);
  return target;
}

Status RdmaSender::PostPiece(const Target& target, bool last_has_immediate, Progress* progress,
                             bool* posted) {
  Piece piece;
  const size_t limit = std::min(target.bytes, kWriteBytes);
  if (Status status = source_.Next(limit, &piece); !status.ok()) return status;
  if (piece.bytes == 0) return Status();
  const bool last = piece.bytes == target.bytes;
  Write write = {piece.data, piece.lkey, piece.bytes, target.address, target.rkey};
  write.has_immediate = last && last_has_immediate;
  write.immediate = Pack(target.kind, target.value);
  write.told = last || piece.ends_slot || untold_ + 1 >= kTellEvery;
  if (Status status = PostWrite(write, piece); !status.ok()) return status;
  source_.Posted(piece);
  if (piece.staged) {
    progress->bytes += piece.bytes;
  } else {
    ++reading_;
  }
  *posted = true;
  in_target_ += piece.bytes;
  if (!write.has_immediate) return Status();
  in_target_ = 0;
  if (target.kind == Immediate::kChunk) {
    ++sent_slots_;
  } else {
    grants_.pop_front();
    ++grants_filled_;
  }
  return Status();
}

Status RdmaSender::PostWrite(const Write& write, const Piece& piece) {
  if (Status status = line_.queue_pair().Post(write); !status.ok()) return status;
  untold_ = write.told ? 0 : untold_ + 1;
  in_flight_.push_back(piece);
  return Status();
}

bool RdmaSender::ArmDoorbell() {
  if (!line_.queue_pair().Arm().ok() || peer() != PeerState::kAlive) return true;
  Progress progress;
  const bool begun = peer_has_begun_;
  const size_t grants = grants_.size();
  const uint64_t freed = freed_;
  const size_t in_flight = in_flight_.size();
  // An error shows again in the next step.
  if (!Poll(&progress).ok()) return true;
  earlier_bytes_ += progress.bytes;
  return peer() != PeerState::kAlive || begun != peer_has_begun_ || grants != grants_.size() ||
         freed != freed_ || in_flight != in_flight_.size();
}

bool RdmaSender::Quiet() {
  if (stage_ == Stage::kIdle) return true;
  if (!line_.Quiet()) return false;
  source_.Abandon();
  return source_.Quiet();
}

bool RdmaSender::Drained() {
  Progress unused;
  // A peer that is gone, in whatever way, takes nothing more. Not in_flight_: giving a message up
  // takes completions past it.
  if (line_.link().peer() == PeerState::kAlive && Poll(&unused).ok() &&
      line_.queue_pair().writes() > 0) {
    return false;
  }
  SendGoodbye();
  return true;
}

void RdmaSender::SendGoodbye() {
  if (std::exchange(goodbye_pending_, false)) line_.link().SayGoodbye();
}

}  // namespace hetccl::transport::rdma
