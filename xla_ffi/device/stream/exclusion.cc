#include "xla_ffi/device/stream/exclusion.h"

namespace hetccl::device {

bool Exclusion::HoldBegins() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (sections_ > 0) return false;
  ++holds_;
  return true;
}

void Exclusion::HoldEnds() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--holds_ == 0) changed_.notify_all();
}

void Exclusion::Open() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++sections_;
}

void Exclusion::Close() {
  std::lock_guard<std::mutex> lock(mutex_);
  --sections_;
}

bool Exclusion::AwaitNoHold(Duration bound) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, bound, [this] { return holds_ == 0; });
}

}  // namespace hetccl::device
