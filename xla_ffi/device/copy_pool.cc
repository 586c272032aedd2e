#include "xla_ffi/device/copy_pool.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <string>
#include <thread>
#include <utility>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/common/copy.h"

namespace hetccl::device {
namespace {

// A piece that one core copies in about 50 us: waking a thread costs a tenth of it.
constexpr size_t kJobBytes = 512 << 10;
// Submissions under way: enough that all threads have work while the proxy thread looks elsewhere.
constexpr int kDepth = 4;
// A thread looks for work as long before it sleeps: a GPU's link brings a slot every 80 us, and to
// wake a thread takes as long on a virtual machine.
constexpr auto kSpin = std::chrono::microseconds(300);

class PoolCopier final : public Copier {
 public:
  explicit PoolCopier(std::shared_ptr<CopyPool> pool) : pool_(std::move(pool)) {}
  ~PoolCopier() override {
    while (!Quiet()) std::this_thread::yield();
  }

  int depth() const override { return kDepth; }
  Status Submit(const CopyPiece* pieces, size_t count, bool past_cache) override;
  Status Poll(uint64_t* ended) override;
  bool Quiet() override {
    uint64_t ended = 0;
    return Poll(&ended).ok() && ended == submitted_;
  }

 private:
  const std::shared_ptr<CopyPool> pool_;
  std::array<std::atomic<int>, kDepth> left_{};  // jobs that submission n % kDepth still has
  std::vector<CopyPool::Job> jobs_;              // reused
  uint64_t submitted_ = 0;
  uint64_t ended_ = 0;
};

Status PoolCopier::Submit(const CopyPiece* pieces, size_t count, bool past_cache) {
  size_t total = 0;
  for (size_t i = 0; i < count; ++i) total += pieces[i].bytes;
  uint64_t ended = 0;
  (void)Poll(&ended).ok();
  if (ended + kDepth <= submitted_) return InternalError("a copier got more than its depth");
  if (total <= kJobBytes) {
    // A job of another thread would cost more. Its turn in the order is that of its number alone.
    for (size_t i = 0; i < count; ++i) {
      Copy(pieces[i].to, pieces[i].from, pieces[i].bytes, past_cache);
    }
    ++submitted_;
    return Status();
  }
  std::atomic<int>* left = &left_[submitted_ % kDepth];
  jobs_.clear();
  for (size_t i = 0; i < count; ++i) {
    for (size_t offset = 0; offset < pieces[i].bytes; offset += kJobBytes) {
      const size_t bytes = std::min(kJobBytes, pieces[i].bytes - offset);
      jobs_.push_back({{pieces[i].to + offset, pieces[i].from + offset, bytes}, past_cache, left});
    }
  }
  left->store(static_cast<int>(jobs_.size()), std::memory_order_relaxed);
  ++submitted_;
  pool_->Post(jobs_);
  return Status();
}

Status PoolCopier::Poll(uint64_t* ended) {
  while (ended_ < submitted_ && left_[ended_ % kDepth].load(std::memory_order_acquire) == 0) {
    ++ended_;
  }
  *ended = ended_;
  return Status();
}

}  // namespace

CopyPool::CopyPool(int threads)
    : limit_(threads > 0
                 ? threads
                 : std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 2, 1, 8)) {}

void CopyPool::Stop() {
  std::vector<Thread> threads;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    changed_.notify_all();
    threads.swap(threads_);
  }
  for (Thread& thread : threads) thread.Join();
}

void CopyPool::Post(const std::vector<Job>& jobs) {
  std::lock_guard<std::mutex> lock(mutex_);
  jobs_.insert(jobs_.end(), jobs.begin(), jobs.end());
  waiting_.store(jobs_.size(), std::memory_order_release);
  const int wanted = static_cast<int>(jobs_.size()) - idle_;
  for (int i = 0; i < wanted && static_cast<int>(threads_.size()) < limit_; ++i) {
    threads_.emplace_back("hetccl-copy-" + std::to_string(threads_.size()), [this] { Run(); });
  }
  if (jobs.size() == 1) {
    changed_.notify_one();
  } else {
    changed_.notify_all();
  }
}

int CopyPool::threads() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(threads_.size());
}

void CopyPool::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    ++idle_;  // also while it spins: Post need not start another one
    if (jobs_.empty() && !stop_) {
      lock.unlock();
      const TimePoint end = Clock::now() + kSpin;
      while (waiting_.load(std::memory_order_acquire) == 0 && Clock::now() < end) ::sched_yield();
      lock.lock();
    }
    changed_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
    --idle_;
    if (jobs_.empty()) return;
    const Job job = jobs_.front();
    jobs_.pop_front();
    waiting_.store(jobs_.size(), std::memory_order_release);
    lock.unlock();
    Copy(job.piece.to, job.piece.from, job.piece.bytes, job.past_cache);
    job.left->fetch_sub(1, std::memory_order_acq_rel);
    lock.lock();
  }
}

std::unique_ptr<Copier> MakePoolCopier(std::shared_ptr<CopyPool> pool) {
  return std::make_unique<PoolCopier>(std::move(pool));
}

}  // namespace hetccl::device
