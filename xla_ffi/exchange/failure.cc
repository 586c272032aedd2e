#include "xla_ffi/exchange/failure.h"

namespace hetccl {

void FailureState::Propose(const Status& status) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!candidate_.ok()) return;
  candidate_ = status;
  candidate_at_ = Clock::now();
  changed_.notify_all();
}

bool FailureState::Adopt(const Status& status) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!adopted_.ok()) return false;
  adopted_ = status;
  adopted_at_ = Clock::now();
  has_adopted_.store(true, std::memory_order_release);
  return true;
}

Status FailureState::adopted() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return adopted_;
}

Duration FailureState::SinceAdoption(TimePoint now) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return now - adopted_at_;
}

std::optional<Status> FailureState::OverdueCandidate(TimePoint now) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (candidate_.ok() || !adopted_.ok() || now - candidate_at_ < grace_) return std::nullopt;
  return candidate_;
}

std::optional<Status> FailureState::WaitCandidate(Duration bound) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, bound, [this] { return closed_ || !candidate_.ok(); });
  if (candidate_.ok()) return std::nullopt;
  return candidate_;
}

void FailureState::Close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

}  // namespace hetccl
