// The one error that a world ends with.
#ifndef XLA_FFI_EXCHANGE_FAILURE_H_
#define XLA_FFI_EXCHANGE_FAILURE_H_

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/common/status.h"

namespace hetccl {

// A failure passes two stages. What this process notices first becomes its *candidate*; all
// processes then agree on one of their candidates, and that one is *adopted* everywhere. If the
// agreement does not come within the grace time, the candidate is adopted as it is. In both stages
// the first one wins and sticks. Thread-safe; calls out to nobody.
class FailureState {
 public:
  explicit FailureState(Duration grace) : grace_(grace) {}

  // Makes this the candidate if there is none. Requires !status.ok().
  void Propose(const Status& status);
  // Adopts this error. True if no other one was adopted before.
  bool Adopt(const Status& status);

  // The adopted error; ok while there is none.
  Status adopted() const;
  // Cheap; may lag behind adopted() by the time a store takes to be seen.
  bool has_adopted() const { return has_adopted_.load(std::memory_order_acquire); }
  // Time since the adoption; requires has_adopted().
  Duration SinceAdoption(TimePoint now) const;
  // The candidate if its grace time is over and nothing was adopted.
  std::optional<Status> OverdueCandidate(TimePoint now) const;

  // Waits for a candidate; the same one is returned by every later call. Empty after `bound` or
  // after Close.
  std::optional<Status> WaitCandidate(Duration bound);
  // Ends all waiting, now and later.
  void Close();

 private:
  const Duration grace_;
  std::atomic<bool> has_adopted_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  Status candidate_;
  TimePoint candidate_at_;
  Status adopted_;
  TimePoint adopted_at_;
  bool closed_ = false;
};

}  // namespace hetccl

#endif  // XLA_FFI_EXCHANGE_FAILURE_H_
