#include "xla_ffi/common/thread.h"

#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <mutex>
#include <utility>

namespace hetccl {

struct Thread::Ended {
  std::mutex mutex;
  std::condition_variable changed;
  bool value = false;  // guarded by mutex
};

void NameThisThread(const std::string& name) {
  ::pthread_setname_np(::pthread_self(), name.substr(0, 15).c_str());
}

Thread::Thread(std::string name, std::function<void()> body) : ended_(std::make_shared<Ended>()) {
  // The mask is inherited, so no signal can arrive before the new thread would have set its own.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([ended = ended_, name = std::move(name), body = std::move(body)] {
      NameThisThread(name);
      body();
      std::lock_guard<std::mutex> lock(ended->mutex);
      ended->value = true;
      ended->changed.notify_all();
    });
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Thread::Join() {
  if (thread_.joinable()) thread_.join();
}

bool Thread::JoinFor(Duration bound) {
  if (!thread_.joinable()) return true;
  bool ended;
  {
    std::unique_lock<std::mutex> lock(ended_->mutex);
    ended = ended_->changed.wait_for(lock, bound, [this] { return ended_->value; });
  }
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
  return ended;
}

}  // namespace hetccl
