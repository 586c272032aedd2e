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
      in_flight_(std::move(in_flight)) {
  in_flight_->fetch_add(1);
}

void Exchange::PartEnded(bool failed) {
  if (failed) failed_.store(true, std::memory_order_relaxed);
  if (parts_.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  in_flight_->fetch_sub(1);
  Waiter waiter;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    complete_ = true;
    waiter = std::move(waiter_);
    waiter_ = nullptr;
  }
  if (!waiter) return;
  const bool any_failed = failed_.load(std::memory_order_relaxed);
  pool_->Post([waiter = std::move(waiter), any_failed] { waiter(any_failed); });
}

bool Exchange::Await(Waiter waiter, bool* failed) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!complete_) {
    waiter_ = std::move(waiter);
    return false;
  }
  *failed = failed_.load(std::memory_order_relaxed);
  return true;
}

}  // namespace hetccl
