// What a proxy thread drives.
#ifndef XLA_FFI_PROXY_TASK_H_
#define XLA_FFI_PROXY_TASK_H_

#include <atomic>
#include <cstdint>
#include <vector>

namespace hetccl::proxy {

class Proxy;

// What a task can say after a step.
enum class Pace {
  kIdle,     // nothing to do until somebody calls Notify or a descriptor becomes ready
  kWaiting,  // has work and waits for the peer: worth asking again soon
  kPolling,  // waits for a device, which wakes nobody: ask again all the time, however long it
             // takes
  kBusy,     // moved something: step again at once
};

// Work that never blocks. Step, poll_fds, OnReady and ArmDoorbell are called on the proxy's thread
// only; Notify may be called from any thread and holds no lock.
class Task {
 public:
  virtual ~Task() = default;

  virtual Pace Step() = 0;
  // Watched edge triggered: readiness leads to a step. Asked once, when the task is added.
  virtual std::vector<int> poll_fds() const = 0;
  // Called when a descriptor has become ready, before the step that this leads to.
  virtual void OnReady() = 0;
  // Called before the thread sleeps while this task waits. True: do not sleep, step again.
  virtual bool ArmDoorbell() = 0;

  // Makes the proxy step this task soon, also if it sleeps. Does nothing before it is added.
  void Notify();
  // See Proxy::steps; 0 before this is added. Any thread, while the proxy lives.
  uint64_t ProxySteps() const;

 private:
  friend class Proxy;
  std::atomic<Proxy*> proxy_{nullptr};
  std::atomic<bool> wanted_{true};
  Pace pace_ = Pace::kIdle;  // proxy thread only
};

}  // namespace hetccl::proxy

#endif  // XLA_FFI_PROXY_TASK_H_
