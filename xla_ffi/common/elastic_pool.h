// Threads for work that may block: as many as there is work, none left over.
#ifndef XLA_FFI_COMMON_ELASTIC_POOL_H_
#define XLA_FFI_COMMON_ELASTIC_POOL_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "xla_ffi/common/clock.h"

namespace hetccl {

// Runs each posted task at once, on an idle thread if there is one, else on a new one. A bounded
// pool would deadlock: completing an exchange runs the rest of a device's XLA program inline, and
// that may wait for a program that another task of this pool must start.
//
// Thread-safe. Threads are called "<name>-N" and retire after `idle_for` without work. No lock is
// held while a task runs.
class ElasticPool {
 public:
  explicit ElasticPool(std::string name, Duration idle_for = std::chrono::seconds(10));
  // Shuts down with a bound of one second if Shutdown was not called.
  ~ElasticPool();
  ElasticPool(const ElasticPool&) = delete;
  ElasticPool& operator=(const ElasticPool&) = delete;

  // Never blocks on other tasks. After Shutdown the task runs on the caller's thread: a completion
  // that arrives late must still complete.
  void Post(std::function<void()> task);
  // Waits for the tasks already posted and joins all threads. Returns the number of threads that
  // still run after `bound` (they are detached; the pool's state outlives them). Idempotent.
  int Shutdown(Duration bound);
  // Threads that exist now.
  size_t size() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace hetccl

#endif  // XLA_FFI_COMMON_ELASTIC_POOL_H_
