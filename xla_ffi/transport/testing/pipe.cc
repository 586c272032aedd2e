#include "xla_ffi/transport/testing/pipe.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

namespace hetccl::transport::testing {

Pipe::Pipe(size_t capacity, const Faults& faults) : faults_(faults), ring_(capacity) {
  for (UniqueFd& fd : wake_) fd = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
}

void Pipe::Wake(Side side) {
  const uint64_t one = 1;
  (void)!::write(fd(side), &one, sizeof(one));
}

size_t Pipe::Allowed(size_t size, TimePoint* last) {
  if (faults_.delay > Duration::zero()) {
    const TimePoint now = Clock::now();
    if (now - *last < faults_.delay) return 0;
    *last = now;
  }
  return std::min(size, faults_.max_step_bytes);
}

size_t Pipe::Write(const std::byte* data, size_t size) {
  size_t count = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (broken_) return 0;
    const size_t room = ring_.size() - static_cast<size_t>(written_ - read_);
    const uint64_t limit = std::min(faults_.reset_after, faults_.stall_after);
    count = std::min({size, room, static_cast<size_t>(limit - std::min(limit, written_))});
    if (count > 0) count = Allowed(count, &last_write_);
    const size_t at = written_ % ring_.size();
    const size_t first = std::min(count, ring_.size() - at);
    std::copy_n(data, first, ring_.data() + at);
    std::copy_n(data + first, count - first, ring_.data());
    written_ += count;
    if (written_ >= faults_.reset_after) broken_ = true;
  }
  Wake(Side::kReceiver);
  if (broken()) Wake(Side::kSender);
  return count;
}

size_t Pipe::Read(std::byte* data, size_t size) {
  size_t count = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (broken_) return 0;
    count = std::min(size, static_cast<size_t>(written_ - read_));
    if (count > 0) count = Allowed(count, &last_read_);
    const size_t at = read_ % ring_.size();
    const size_t first = std::min(count, ring_.size() - at);
    std::copy_n(ring_.data() + at, first, data);
    std::copy_n(ring_.data(), count - first, data + first);
    read_ += count;
  }
  if (count > 0) Wake(Side::kSender);
  return count;
}

void Pipe::CountAccepted() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++accepted_;
}

uint64_t Pipe::accepted() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return accepted_;
}

void Pipe::SayGoodbye(Side side) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    goodbye_[static_cast<int>(side)] = true;
  }
  Wake(Other(side));
}

void Pipe::Close(Side side) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_[static_cast<int>(side)] = true;
  }
  Wake(Other(side));
}

PeerState Pipe::PeerOf(Side side) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (broken_) return PeerState::kLost;
  const int other = static_cast<int>(Other(side));
  // What was written before the end can still be read.
  if (side == Side::kReceiver && written_ > read_) return PeerState::kAlive;
  if (goodbye_[other]) return PeerState::kGoodbye;
  return closed_[other] ? PeerState::kLost : PeerState::kAlive;
}

bool Pipe::broken() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return broken_;
}

}  // namespace hetccl::transport::testing
