// Several threads that share large copies between host memory and slots.
#ifndef XLA_FFI_DEVICE_COPY_POOL_H_
#define XLA_FFI_DEVICE_COPY_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "xla_ffi/common/thread.h"
#include "xla_ffi/device/space.h"

namespace hetccl::device {

// Owns its threads, "hetccl-copy-N": none before the first work, at most the given number, joined
// by Stop. Thread-safe; no lock is held while bytes are copied.
class CopyPool {
 public:
  // 0: half the cores, 1 to 8.
  explicit CopyPool(int threads);
  ~CopyPool() { Stop(); }
  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;

  struct Job {
    CopyPiece piece;
    bool past_cache;
    // Counted down, releasing, when the piece is copied; outlives the job.
    std::atomic<int>* left;
  };
  void Post(const std::vector<Job>& jobs);
  // Runs what was posted and joins the threads. Nothing may be posted any more. Idempotent.
  void Stop();
  // Threads that were started.
  int threads() const;
  int limit() const { return limit_; }

 private:
  void Run();

  const int limit_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  std::deque<Job> jobs_;
  std::vector<Thread> threads_;
  int idle_ = 0;
  bool stop_ = false;
  std::atomic<size_t> waiting_{0};  // jobs; as many as jobs_ has, for those who spin
};

// Splits each large submission over the pool; copies small ones on the calling thread. Its
// destructor waits for its copies.
std::unique_ptr<Copier> MakePoolCopier(std::shared_ptr<CopyPool> pool);

}  // namespace hetccl::device

#endif  // XLA_FFI_DEVICE_COPY_POOL_H_
