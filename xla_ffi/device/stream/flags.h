// The words through which streams and the host tell each other how far they are.
#ifndef XLA_FFI_DEVICE_STREAM_FLAGS_H_
#define XLA_FFI_DEVICE_STREAM_FLAGS_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "xla_ffi/common/status.h"
#include "xla_ffi/device/driver/gpu.h"

namespace hetccl::device {

// How streams and the host signal each other.
enum class StreamSync {
  kMemops,    // stream memory operations on words in pinned memory
  kHostFunc,  // events that the host asks about, and host functions that hold a stream
};

// How a stream tells the host.
enum class MarkKind {
  kWord,   // it writes a word in pinned memory: the host looks without asking the driver
  kEvent,  // an event that the host asks about
};

// What a stream tells the host: that it has come to a point. Made by MarkPool.
struct Mark {
  uint32_t* host = nullptr;  // kWord
  void* device = nullptr;
  uint32_t value = 0;     // what the word will at least be
  Event event = nullptr;  // kEvent
};

// What the host tells a stream: that it may go on. Made by FlagPool.
struct Flag {
  Signal signal;  // kMemops
  uint32_t value = 0;
  std::mutex mutex;  // kHostFunc; guards the next
  std::condition_variable changed;
  bool released = false;
  class FlagPool* pool = nullptr;
};

// Counts what was ever asked of the driver, so that tests and statistics see that nothing is
// allocated for each call. Any thread.
struct Allocations {
  std::atomic<int64_t> calls{0};
  std::atomic<int64_t> pinned_bytes{0};
  std::atomic<int64_t> registered_bytes{0};
  std::atomic<int64_t> marks{0};
  std::atomic<int64_t> flags{0};
};

// Thread-safe; with events it asks the driver under its lock. Never destroyed with marks in it, as
// streams of XLA may still have them queued. The device must be current.
class MarkPool {
 public:
  MarkPool(const Gpu& gpu, MarkKind kind, Allocations* allocations)
      : gpu_(gpu), kind_(kind), allocations_(*allocations) {}

  // Makes this many more. Never in a handler: drivers may wait for the device when they allocate.
  Status Reserve(int count);
  // An error that says what to do if all are in use.
  Status Acquire(Mark** mark);
  // Makes one if all are in use; as for Reserve, never in a handler.
  Status AcquireOrMake(Mark** mark);
  void Release(Mark* mark);
  // Queues the mark's next value.
  Status Record(Mark* mark, Stream stream);
  // The device must be current if this asks the driver.
  Status Reached(const Mark& mark, bool* reached) const;
  bool asks_driver() const { return kind_ == MarkKind::kEvent; }

 private:
  Status Make(int count, std::vector<std::unique_ptr<Mark>>* marks);
  // Null if all are in use; with mutex_ held.
  Status TakeFree(Mark** mark);

  const Gpu& gpu_;
  const MarkKind kind_;
  Allocations& allocations_;
  std::mutex mutex_;
  // Guarded by mutex_:
  std::vector<std::unique_ptr<Mark>> all_;
  std::deque<Mark*> free_;
};

// As MarkPool. A flag goes back to the pool when it was released and its stream no longer needs it.
class FlagPool {
 public:
  // `first`: where the flags' counters begin; for tests of their end.
  FlagPool(const Gpu& gpu, StreamSync sync, Allocations* allocations, uint32_t first = 0)
      : gpu_(gpu), sync_(sync), first_(first), allocations_(*allocations) {}

  // Makes this many more; as for marks, never in a handler.
  Status Reserve(int count);
  // Null unless more than `spare` are free.
  Flag* Acquire(size_t spare = 0);
  // Queues that the stream waits for the next Release.
  Status Hold(Flag* flag, Stream stream);
  // Lets the stream go on and gives the flag back. Any thread; calls no driver function.
  void Release(Flag* flag);
  // Gives back a flag that no stream waits for.
  void Abandon(Flag* flag);

 private:
  Status MakeSignals(int count, std::vector<Signal>* signals);
  // HIP compares without wrapping around: past the last value nothing would hold any more.
  bool UsedUp(const Flag& flag) const {
    return sync_ == StreamSync::kMemops && gpu_.vendor() == Vendor::kHip &&
           flag.value == UINT32_MAX;
  }
  static void WaitInHostFunction(void* data);

  const Gpu& gpu_;
  const StreamSync sync_;
  const uint32_t first_;
  Allocations& allocations_;
  std::mutex mutex_;
  // Guarded by mutex_:
  std::vector<std::unique_ptr<Flag>> all_;
  std::deque<Flag*> free_;
};

}  // namespace hetccl::device

#endif  // XLA_FFI_DEVICE_STREAM_FLAGS_H_
