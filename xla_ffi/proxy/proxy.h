// The thread that moves data: steps its tasks while something moves, spins for a short while when
// nothing does, then sleeps until a task is notified or a descriptor becomes ready. While a task
// waits for a device it naps instead, for a fraction of the time that it has waited.
#ifndef XLA_FFI_PROXY_PROXY_H_
#define XLA_FFI_PROXY_PROXY_H_

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/common/fd.h"
#include "xla_ffi/common/thread.h"
#include "xla_ffi/proxy/task.h"

namespace hetccl::proxy {

// Owns one thread. Tasks are shared with their creators and are kept until the proxy is destroyed.
// Add, Wake and Stop are thread-safe.
class Proxy {
 public:
  // Spins for `spin` after the last progress before it sleeps.
  Proxy(std::string name, Duration spin);
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  // From now on this thread steps the task. A task belongs to one proxy.
  void Add(std::shared_ptr<Task> task);
  // Ends the thread after the step under way and waits for it, bounded; false if it did not end
  // (then the state it needs must be leaked with it). Idempotent. No task is stepped afterwards.
  bool Stop(Duration bound);
  // Counts the begins and the ends of steps: odd while the thread is inside of one. A step does not
  // block, so that one that lasts is stuck in a call out, such as a driver's. Any thread.
  uint64_t steps() const { return steps_.load(std::memory_order_relaxed); }

 private:
  friend class Task;
  void Wake();
  void Run();
  void AdoptNewTasks();
  // Steps every task that wants it. Says what the tasks wait for; true if one moved.
  bool StepTasks(bool* waiting, bool* polling);
  // Marks the tasks whose descriptors are ready; waits for one at most `timeout_ms`.
  void Poll(int timeout_ms);
  void Sleep();
  // Sleeps for about this long, or until something wakes the thread.
  void Nap(Duration duration);

  const Duration spin_;
  UniqueFd epoll_;
  UniqueFd wake_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> sleeping_{false};
  std::atomic<uint64_t> steps_{0};  // written by the proxy thread
  std::mutex mutex_;
  std::vector<std::shared_ptr<Task>> new_tasks_;  // guarded by mutex_
  std::atomic<bool> has_new_tasks_{false};
  std::vector<std::shared_ptr<Task>> tasks_;  // proxy thread only
  Thread thread_;
};

}  // namespace hetccl::proxy

#endif  // XLA_FFI_PROXY_PROXY_H_
