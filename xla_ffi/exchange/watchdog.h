// A thread that calls a function every so often.
#ifndef XLA_FFI_EXCHANGE_WATCHDOG_H_
#define XLA_FFI_EXCHANGE_WATCHDOG_H_

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/common/thread.h"

namespace hetccl {

// Owns the thread "hetccl-watchdog". `check` must not block and holds no lock of the caller.
class Watchdog {
 public:
  Watchdog(Duration interval, std::function<void()> check);
  ~Watchdog() { Stop(); }

  // Ends the thread after the check under way. Idempotent.
  void Stop();

 private:
  void Run(Duration interval, const std::function<void()>& check);

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;  // guarded by mutex_
  Thread thread_;
};

}  // namespace hetccl

#endif  // XLA_FFI_EXCHANGE_WATCHDOG_H_
