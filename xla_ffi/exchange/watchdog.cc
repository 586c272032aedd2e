#include "xla_ffi/exchange/watchdog.h"

#include <utility>

namespace hetccl {

Watchdog::Watchdog(Duration interval, std::function<void()> check) {
  thread_ = Thread("hetccl-watchdog",
                   [this, interval, check = std::move(check)] { Run(interval, check); });
}

void Watchdog::Run(Duration interval, const std::function<void()>& check) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!changed_.wait_for(lock, interval, [this] { return stop_; })) {
    lock.unlock();
    check();
    lock.lock();
  }
}

void Watchdog::Stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  thread_.Join();
}

}  // namespace hetccl
