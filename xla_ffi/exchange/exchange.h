// One running exchange of one device: the parts that are still moving and who waits for them.
#ifndef XLA_FFI_EXCHANGE_EXCHANGE_H_
#define XLA_FFI_EXCHANGE_EXCHANGE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/common/elastic_pool.h"
#include "xla_ffi/device/space.h"
#include "xla_ffi/exchange/plan.h"

namespace hetccl {

// Thread-safe. Complete when every part (one message to or from one peer) has ended, well or not;
// from then on no thread of the engine touches the exchange's buffers.
//
// Completion: the waiter runs on the completion pool, not on the thread that ended the last part
// (that is a proxy thread, and the waiter may run the rest of an XLA program), unless it promises
// to be brief: only then is it worth the two thread switches that are saved. No lock is held then.
class Exchange {
 public:
  using Waiter = std::function<void(bool failed)>;
  enum class Runs {
    kOnPool,
    kAtOnce,  // on whatever thread ends the last part: must neither wait nor run a program
  };

  // Begins with one part that stands for the starting itself: call PartEnded once all others are
  // posted.
  Exchange(uint64_t id, std::shared_ptr<const DevicePlan> plan, uint64_t program, uint32_t index,
           std::shared_ptr<ElasticPool> pool, std::shared_ptr<std::atomic<int64_t>> in_flight);

  uint64_t id() const { return id_; }
  const DevicePlan& plan() const { return *plan_; }
  uint64_t program() const { return program_; }
  uint32_t index() const { return index_; }

  // Before posting a part.
  void AddPart() { parts_.fetch_add(1, std::memory_order_relaxed); }
  // After a part: nothing will touch its memory any more.
  void PartEnded(bool failed);

  // Asks to be told of the completion. True if it is complete already: *failed is set and the
  // waiter is not kept. May be called once.
  bool Await(Waiter waiter, bool* failed, Runs runs = Runs::kOnPool);
  // Whether it is complete, and if so, whether it failed.
  bool Complete(bool* failed) const;
  // The pool that waiters run on, for what such a waiter must not do itself.
  ElasticPool& pool() const { return *pool_; }

  // Until the program's own device has come to the start, the buffers are not this exchange's: no
  // part may begin. Set before the exchange is shared; without a gate it has started.
  void SetGate(std::shared_ptr<device::Gate> gate);
  // Asks the gate. Any thread of the engine. An error means that the device is lost.
  Status PollStarted(bool* started);
  bool gate_asks_driver() const { return gate_ != nullptr && gate_->asks_driver(); }
  // When it was first seen to have started; the far future before. Any thread.
  TimePoint started_at() const;

  // The buffers as start saw them, to compare with those that done sees. Set before the exchange
  // is shared.
  std::vector<const void*> receive_addresses;
  std::vector<const void*> send_addresses;

 private:
  const uint64_t id_;
  const std::shared_ptr<const DevicePlan> plan_;
  const uint64_t program_;
  const uint32_t index_;
  const std::shared_ptr<ElasticPool> pool_;
  const std::shared_ptr<std::atomic<int64_t>> in_flight_;
  std::atomic<int> parts_{1};
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::shared_ptr<device::Gate> gate_;  // constant once shared
  std::atomic<int64_t> started_at_;     // Clock ticks
  // Guarded by mutex_:
  bool complete_ = false;
  Waiter waiter_;
  Runs runs_ = Runs::kOnPool;
};

}  // namespace hetccl

#endif  // XLA_FFI_EXCHANGE_EXCHANGE_H_
