// The order that ThreadSanitizer sees for the work of a stream: that of the GPU, not of our locks.
#ifndef XLA_FFI_DEVICE_TWIN_LANE_H_
#define XLA_FFI_DEVICE_TWIN_LANE_H_

#include <atomic>
#include <functional>
#include <thread>

namespace hetccl::twin {

// What touches memory. Made by the thread that queues it; run and deleted by the stream's lane.
struct Work {
  std::function<void()> run;    // either: do this
  std::function<bool()> ready;  // or: ask this until it is true, or `lost` is
  std::function<bool()> lost;
};

// All that the calling thread has done happens before what follows an Observe of the same address.
// Nothing without ThreadSanitizer.
void Publish(const void* token);
void Observe(const void* token);

// Does a stream's work. The stream's thread takes the scheduler's mutex between operations, so
// whatever it does is ordered behind everything that other threads did before they took that mutex:
// ThreadSanitizer would miss a host that writes a buffer while it is still to be copied. With
// ThreadSanitizer a lane is therefore a thread of its own, which gets its work without any order
// that ThreadSanitizer sees, but for Observe, Publish and the flags in memory. Without, the caller
// does the work itself.
class Lane {
 public:
  Lane();
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // In this order: observes a token, runs the work if `run`, deletes it, publishes two tokens. Any
  // may be null. Returns when that is done.
  void Do(const void* observed, Work* work, bool run, const void* published,
          const void* also_published);

 private:
  static void DoHere(const void* observed, Work* work, bool run, const void* published,
                     const void* also_published);
#if defined(__SANITIZE_THREAD__)
  enum State : int { kIdle, kPosted, kEnd };
  void Loop();
  void Await(bool posted);
  void Change(State state);

  // Only ever used in relaxed order, which is no order to ThreadSanitizer.
  std::atomic<int> state_{kIdle};
  std::atomic<const void*> observed_{nullptr};
  std::atomic<Work*> work_{nullptr};
  std::atomic<bool> run_{false};
  std::atomic<const void*> published_{nullptr};
  std::atomic<const void*> also_published_{nullptr};
  std::thread thread_;
#endif
};

}  // namespace hetccl::twin

#endif  // XLA_FFI_DEVICE_TWIN_LANE_H_
