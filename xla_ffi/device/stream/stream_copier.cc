#include "xla_ffi/device/stream/stream_copier.h"

#include <chrono>
#include <shared_mutex>
#include <thread>
#include <utility>

namespace hetccl::device {
namespace {

// A copy of the largest slot takes a millisecond.
constexpr auto kSilence = std::chrono::milliseconds(100);
constexpr auto kCloseBound = std::chrono::seconds(5);

}  // namespace

StreamCopier::StreamCopier(std::shared_ptr<StreamSpace> space, Direction direction, SlotsOn slots)
    : space_(std::move(space)), direction_(direction), slots_(slots) {}

Status StreamCopier::Initialise() {
  const ScopedCurrent current(space_->gpu_);
  if (!current.status().ok()) return current.status();
  for (Mark*& mark : marks_) {
    if (Status status = space_->copy_marks_.AcquireOrMake(&mark); !status.ok()) return status;
  }
  return Status();
}

StreamCopier::~StreamCopier() {
  const TimePoint deadline = Clock::now() + kCloseBound;
  while (!Quiet() && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  for (Mark* mark : marks_) {
    if (mark != nullptr) space_->copy_marks_.Release(mark);
  }
}

Status StreamCopier::Queue(const CopyPiece& piece, Stream stream) const {
  const Gpu& gpu = space_->gpu_;
  if (slots_ == SlotsOn::kDevice) {
    return gpu.MemcpyDtoDAsync(piece.to, piece.from, piece.bytes, stream);
  }
  return direction_ == Direction::kOut
             ? gpu.MemcpyDtoHAsync(piece.to, piece.from, piece.bytes, stream)
             : gpu.MemcpyHtoDAsync(piece.to, piece.from, piece.bytes, stream);
}

Status StreamCopier::Submit(const CopyPiece* pieces, size_t count, bool) {
  if (!lost_.ok()) return lost_;
  if (submitted_ - ended_ >= kDepth) return InternalError("a copier got more than its depth");
  if (Status status = space_->Enter(); !status.ok()) return status;
  if (submitted_ == ended_) last_progress_ = Clock::now();
  const std::shared_lock<std::shared_mutex> lock(space_->copy_streams_mutex_);
  const Stream stream = space_->copy_stream(direction_);
  for (size_t i = 0; i < count; ++i) {
    if (Status status = Queue(pieces[i], stream); !status.ok()) return lost_ = status;
  }
  if (Status status = space_->copy_marks_.Record(marks_[submitted_ % kDepth], stream);
      !status.ok()) {
    return lost_ = status;
  }
  ++submitted_;
  return Status();
}

Status StreamCopier::Poll(uint64_t* ended) {
  const uint64_t before = ended_;
  if (ended_ < submitted_ && space_->copy_marks_.asks_driver()) {
    if (Status status = space_->Enter(); !status.ok()) return status;
  }
  while (ended_ < submitted_) {
    bool reached = false;
    const Mark& mark = *marks_[ended_ % kDepth];
    if (Status status = space_->copy_marks_.Reached(mark, &reached); !status.ok()) return status;
    if (!reached) break;
    ++ended_;
  }
  *ended = ended_;
  if (ended_ == submitted_) return Status();
  if (ended_ > before) last_progress_ = Clock::now();
  if (Clock::now() - last_progress_ < kSilence) return Status();
  last_progress_ = Clock::now();
  return CheckDevice();
}

bool StreamCopier::Quiet() {
  uint64_t ended = 0;
  if (!Poll(&ended).ok()) return true;  // a lost device touches nothing
  if (ended < submitted_) return false;
  if (lost_.ok()) return true;
  // Pieces of the failed submission may be queued, and no mark stands for them.
  bool idle = false;
  if (!space_->Enter().ok()) return true;
  const std::shared_lock<std::shared_mutex> lock(space_->copy_streams_mutex_);
  return !space_->gpu_.StreamQuery(space_->copy_stream(direction_), &idle).ok() || idle;
}

Status StreamCopier::CheckDevice() {
  if (Status status = space_->Enter(); !status.ok()) return status;
  bool idle = false;
  const std::shared_lock<std::shared_mutex> lock(space_->copy_streams_mutex_);
  return space_->gpu_.StreamQuery(space_->copy_stream(direction_), &idle);
}

}  // namespace hetccl::device
