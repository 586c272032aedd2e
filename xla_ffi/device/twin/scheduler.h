// The test twin's streams and events, and when their operations run.
#ifndef XLA_FFI_DEVICE_TWIN_SCHEDULER_H_
#define XLA_FFI_DEVICE_TWIN_SCHEDULER_H_

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "xla_ffi/device/twin/lane.h"
#include "xla_ffi/device/twin/settings.h"

namespace hetccl::twin {

using Handle = uintptr_t;  // never used twice, so that the use of a destroyed one shows

inline constexpr int kMaxDevices = 8;

// One recording of an event. Guarded by the scheduler's mutex.
struct Recording {
  bool done = false;
};

struct Operation {
  std::string call;                      // the function that queued it
  std::unique_ptr<Work> work;            // either: this
  std::shared_ptr<Recording> completed;  // or: complete this
  std::function<void()> host_function;   // or: have this done by the one thread for host functions
};

// A list of this one.
std::vector<Operation> Only(Operation operation);

// One thread per stream. As on the hardware, streams share a few queues (the number "queues"),
// dealt out in turn: an operation runs when all that were queued before it in its hardware queue
// are done, so a stream that waits holds up all streams of its queue. All host functions of the
// process run on one thread, and their stream waits meanwhile. Thread-safe; codes of codes.h.
class Scheduler {
 public:
  explicit Scheduler(Settings* settings);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  int CreateStream(int device, Handle* stream);
  // What is queued still runs.
  int DestroyStream(Handle stream);
  int DeviceOf(Handle stream, int* device);
  // Handle 0: the legacy default stream of `device`. `wait`: returns when it has run.
  int Enqueue(Handle stream, int device, std::vector<Operation> operations, bool wait);
  int QueryStream(Handle stream, int device);
  int SynchronizeStream(Handle stream, int device);
  // All that is queued on the device now.
  int SynchronizeDevice(int device);

  int CreateEvent(int device, Handle* event);
  int RecordEvent(const std::string& call, Handle event, Handle stream, int device);
  int QueryEvent(Handle event);

  // Loses the device: what is queued is dropped, what waits returns, all with this code.
  void Break(int device, int code);
  int broken(int device) const { return broken_[static_cast<size_t>(device)].load(); }

  int64_t streams() const;
  int64_t events() const;
  // Drops all streams, events and what is queued, and mends the devices.
  void Reset();

 private:
  struct Stream;
  struct Queue {
    std::deque<Stream*> order;  // whose operation comes next
  };
  struct EventState {
    int device = 0;
    std::shared_ptr<Recording> last;  // null: never recorded, so complete
  };

  Stream* Find(Handle stream, int device);
  Stream* Make(int device);
  void JoinEnded();
  void RunStream(Stream* stream);
  void Execute(std::unique_lock<std::mutex>& lock, Stream* stream, Operation* operation);
  void RunOnHostThread(std::unique_lock<std::mutex>& lock, Stream* stream,
                       const std::function<void()>& function);
  void HostThread();
  bool Lost(int device) const { return stopping_.load() || broken(device) != 0; }

  Settings& settings_;
  mutable std::mutex mutex_;          // guards all that follows but for the atomics
  std::condition_variable progress_;  // an operation has run
  std::map<Handle, std::unique_ptr<Stream>> streams_;
  std::map<int, std::unique_ptr<Stream>> default_streams_;
  std::vector<std::unique_ptr<Stream>> destroyed_;
  std::map<Handle, EventState> events_;
  std::map<int, std::vector<Queue>> queues_;  // by device
  std::map<int, size_t> next_queue_;
  Handle next_handle_ = 0x1000;

  std::thread host_thread_;
  std::condition_variable host_wake_;
  std::deque<std::function<void()>> host_functions_;

  std::atomic<bool> stopping_{false};
  std::array<std::atomic<int>, kMaxDevices> broken_{};
};

// Whether the calling thread is inside a host function, where the driver must not be called.
bool InHostFunction();

}  // namespace hetccl::twin

#endif  // XLA_FFI_DEVICE_TWIN_SCHEDULER_H_
