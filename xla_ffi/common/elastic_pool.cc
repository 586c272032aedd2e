#include "xla_ffi/common/elastic_pool.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <list>
#include <mutex>
#include <system_error>
#include <utility>

#include "xla_ffi/common/thread.h"

namespace hetccl {

// Shared with the threads, because one that is stuck in a task may outlive the pool.
struct ElasticPool::State : std::enable_shared_from_this<ElasticPool::State> {
  State(std::string name, Duration idle_for) : name(std::move(name)), idle_for(idle_for) {}

  void Post(std::function<void()> task);
  // Starts one more thread. Requires the mutex. If the system gives no more threads, the task waits
  // for one of those that run; throws when there is none.
  void Spawn();
  void Run();
  // Takes the next task; false when this thread should end. Requires the lock.
  bool Next(std::unique_lock<std::mutex>& lock, std::function<void()>* task);
  int Shutdown(Duration bound);

  const std::string name;
  const Duration idle_for;
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable ended;
  // Guarded by mutex:
  std::deque<std::function<void()>> queue;
  std::list<Thread> threads;
  std::list<std::list<Thread>::iterator> retired;  // ended by themselves, not yet joined
  size_t idle = 0;
  size_t running = 0;  // threads that have not left Run
  int spawned = 0;
  bool stopping = false;
};

void ElasticPool::State::Post(std::function<void()> task) {
  std::list<Thread> reaped;  // joined after the lock is gone
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!stopping) {
      queue.push_back(std::move(task));
      task = nullptr;
      for (auto it : retired) reaped.splice(reaped.end(), threads, it);
      retired.clear();
      if (queue.size() > idle) {
        Spawn();
      } else {
        work.notify_one();
      }
    }
  }
  if (task) task();
}

void ElasticPool::State::Spawn() {
  ++running;
  auto slot = threads.emplace(threads.end());
  auto body = [self = shared_from_this(), slot] {
    self->Run();
    std::lock_guard<std::mutex> lock(self->mutex);
    --self->running;
    if (!self->stopping) self->retired.push_back(slot);
    self->ended.notify_all();
  };
  try {
    *slot = Thread(name + "-" + std::to_string(spawned++), std::move(body));
  } catch (const std::system_error&) {
    threads.erase(slot);
    if (--running == 0) throw;
  }
}

bool ElasticPool::State::Next(std::unique_lock<std::mutex>& lock, std::function<void()>* task) {
  ++idle;
  const bool woken = work.wait_for(lock, idle_for, [this] { return stopping || !queue.empty(); });
  --idle;
  if (!woken || queue.empty()) return false;
  *task = std::move(queue.front());
  queue.pop_front();
  return true;
}

void ElasticPool::State::Run() {
  std::unique_lock<std::mutex> lock(mutex);
  std::function<void()> task;
  while (Next(lock, &task)) {
    lock.unlock();
    task();
    task = nullptr;  // its captures may be destroyed only without the lock
    lock.lock();
  }
}

int ElasticPool::State::Shutdown(Duration bound) {
  const TimePoint deadline = Clock::now() + bound;
  std::list<Thread> all;
  {
    std::unique_lock<std::mutex> lock(mutex);
    stopping = true;
    work.notify_all();
    ended.wait_until(lock, deadline, [this] { return running == 0; });
    all.swap(threads);
    retired.clear();
  }
  int stuck = 0;
  for (Thread& thread : all) {
    const Duration left = deadline - Clock::now();
    if (!thread.JoinFor(std::max(left, Duration(std::chrono::milliseconds(10))))) ++stuck;
  }
  return stuck;
}

ElasticPool::ElasticPool(std::string name, Duration idle_for)
    : state_(std::make_shared<State>(std::move(name), idle_for)) {}

ElasticPool::~ElasticPool() { Shutdown(std::chrono::seconds(1)); }

void ElasticPool::Post(std::function<void()> task) { state_->Post(std::move(task)); }

int ElasticPool::Shutdown(Duration bound) { return state_->Shutdown(bound); }

size_t ElasticPool::size() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->running;
}

}  // namespace hetccl
