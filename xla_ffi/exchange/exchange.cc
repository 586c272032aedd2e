#include "xla_ffi/exchange/exchange.h"

#include <utility>

namespace hetccl {

Exchange::Exchange(uint64_t id, std::shared_ptr<const DevicePlan> plan, uint64_t program,
                   uint32_t index, std::shared_ptr<ElasticPool> pool,
                   std::shared_ptr<std::atomic<int64_t>> in_flight)
    : id_(id),
      plan_(std::move(plan)),
      program_(program),
      index_(index),
      pool_(std::move(pool)),
      in_flight_(std::move(in_flight)),
      started_at_(Clock::now().time_since_epoch().count()) {
  in_flight_->fetch_add(1);
}

void Exchange::SetGate(std::shared_ptr<device::Gate> gate) {
  gate_ = std::move(gate);
  if (gate_ != nullptr) started_at_.store(TimePoint::max().time_since_epoch().count());
}

Status Exchange::PollStarted(bool* started) {
  constexpr int64_t kNotYet = TimePoint::max().time_since_epoch().count();
  *started = started_at_.load(std::memory_order_acquire) != kNotYet;
  if (*started) return Status();
  if (Status status = gate_->Poll(started); !status.ok() || !*started) return status;
  int64_t expected = kNotYet;
  started_at_.compare_exchange_strong(expected, Clock::now().time_since_epoch().count());
  return Status();
}

TimePoint Exchange::started_at() const {
  return TimePoint(Duration(started_at_.load(std::memory_order_acquire)));
}

void Exchange::PartEnded(bool failed) {
  if (failed) failed_.store(true, std::memory_order_relaxed);
  if (parts_.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  in_flight_->fetch_sub(1);
  Waiter waiter;
  Runs runs;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    complete_ = true;
    waiter = std::move(waiter_);
    waiter_ = nullptr;
    runs = runs_;
  }
  if (!waiter) return;
  const bool any_failed = failed_.load(std::memory_order_relaxed);
  if (runs == Runs::kAtOnce) {
    waiter(any_failed);
    return;
  }
  pool_->Post([waiter = std::move(waiter), any_failed] { waiter(any_failed); });
}

bool Exchange::Complete(bool* failed) const {
  std::lock_guard<std::mutex> lock(mutex_);
  *failed = failed_.load(std::memory_order_relaxed);
  return complete_;
}

bool Exchange::Await(Waiter waiter, bool* failed, Runs runs) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!complete_) {
    waiter_ = std::move(waiter);
    runs_ = runs;
    return false;
  }
  *failed = failed_.load(std::memory_order_relaxed);
  return true;
}

}  // namespace hetccl
