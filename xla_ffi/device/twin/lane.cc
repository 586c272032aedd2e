#include "xla_ffi/device/twin/lane.h"

#include <chrono>

#if defined(__SANITIZE_THREAD__)
#include <linux/futex.h>
#include <pthread.h>
#include <sanitizer/tsan_interface.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hetccl::twin {

void Lane::DoHere(const void* observed, Work* work, bool run, const void* published,
                  const void* also_published) {
  if (observed != nullptr) Observe(observed);
  if (work != nullptr && run) {
    if (work->run) work->run();
    for (int tries = 0; work->ready && !work->ready() && !work->lost(); ++tries) {
      if (tries < 20) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    }
  }
  delete work;
  if (published != nullptr) Publish(published);
  if (also_published != nullptr) Publish(also_published);
}

#if !defined(__SANITIZE_THREAD__)

void Publish(const void*) {}
void Observe(const void*) {}

Lane::Lane() = default;
Lane::~Lane() = default;
void Lane::Do(const void* observed, Work* work, bool run, const void* published,
              const void* also_published) {
  DoHere(observed, work, run, published, also_published);
}

#else

void Publish(const void* token) { __tsan_release(const_cast<void*>(token)); }
void Observe(const void* token) { __tsan_acquire(const_cast<void*>(token)); }

Lane::Lane() : thread_([this] { Loop(); }) {}

Lane::~Lane() {
  Change(kEnd);
  thread_.join();
}

void Lane::Do(const void* observed, Work* work, bool run, const void* published,
              const void* also_published) {
  observed_.store(observed, std::memory_order_relaxed);
  work_.store(work, std::memory_order_relaxed);
  run_.store(run, std::memory_order_relaxed);
  published_.store(published, std::memory_order_relaxed);
  also_published_.store(also_published, std::memory_order_relaxed);
  Change(kPosted);
  Await(false);
}

void Lane::Loop() {
  ::pthread_setname_np(::pthread_self(), "twin-lane");
  for (;;) {
    Await(true);
    if (state_.load(std::memory_order_relaxed) == kEnd) return;
    DoHere(observed_.load(std::memory_order_relaxed), work_.load(std::memory_order_relaxed),
           run_.load(std::memory_order_relaxed), published_.load(std::memory_order_relaxed),
           also_published_.load(std::memory_order_relaxed));
    Change(kIdle);
  }
}

namespace {

// A full barrier of the machine, and not one that ThreadSanitizer knows.
void Barrier() {
#if defined(__x86_64__)
  asm volatile("mfence" ::: "memory");
#elif defined(__aarch64__)
  asm volatile("dmb ish" ::: "memory");
#else
#error "a barrier for this processor"
#endif
}

}  // namespace

void Lane::Change(State state) {
  static_assert(sizeof(state_) == sizeof(int));
  Barrier();
  state_.store(state, std::memory_order_relaxed);
  ::syscall(SYS_futex, &state_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

void Lane::Await(bool posted) {
  for (;;) {
    const int now = state_.load(std::memory_order_relaxed);
    if (posted ? now != kIdle : now == kIdle) break;
    ::syscall(SYS_futex, &state_, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);
  }
  Barrier();
}

#endif

}  // namespace hetccl::twin
