#include "xla_ffi/proxy/proxy.h"

#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace hetccl::proxy {
namespace {

// Descriptors of tasks that are idle are looked at this often while other tasks keep the thread
// busy: often enough to see a peer's end, rarely enough to cost nothing.
constexpr unsigned kStepsBetweenPolls = 64;
// Sleep is never longer, so that a lost wake-up costs a second and not a hang.
constexpr int kMaxSleepMs = 1000;

// A device is asked this often: seldom enough to leave the core to others during a long kernel,
// often enough to cost a few per cent of what it was waited for.
constexpr auto kShortestNap = std::chrono::microseconds(10);
constexpr auto kLongestNap = std::chrono::microseconds(100);
constexpr int kNapFraction = 32;

// Spinning must not keep the core from the thread that it waits for: on two cores with two
// processes, a pause instead of a yield made 4 KB take three times and 4 MB twice as long.
void Relax() { ::sched_yield(); }

}  // namespace

void Task::Notify() {
  wanted_.store(true, std::memory_order_seq_cst);
  if (Proxy* proxy = proxy_.load(std::memory_order_acquire)) proxy->Wake();
}

uint64_t Task::ProxySteps() const {
  const Proxy* proxy = proxy_.load(std::memory_order_acquire);
  return proxy != nullptr ? proxy->steps() : 0;
}

Proxy::Proxy(std::string name, Duration spin)
    : spin_(spin),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLET;
  event.data.ptr = nullptr;
  if (!epoll_.valid() || !wake_.valid() ||
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "hetccl: a proxy thread's epoll");
  }
  thread_ = Thread(std::move(name), [this] { Run(); });
}

Proxy::~Proxy() {
  stop_.store(true);
  Wake();
}

bool Proxy::Stop(Duration bound) {
  stop_.store(true);
  Wake();
  return thread_.JoinFor(bound);
}

void Proxy::Add(std::shared_ptr<Task> task) {
  task->proxy_.store(this, std::memory_order_release);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    new_tasks_.push_back(std::move(task));
    has_new_tasks_.store(true);
  }
  Wake();
}

// The sleeper publishes sleeping_ before it looks for reasons to stay awake, the waker publishes
// its reason before it looks at sleeping_ (both sequentially consistent): one of them sees the
// other.
void Proxy::Wake() {
  if (!sleeping_.load(std::memory_order_seq_cst)) return;
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof(one));
}

void Proxy::Run() {
  TimePoint last_progress = Clock::now();
  unsigned steps = 0;  // wraps around in a long run
  while (!stop_.load(std::memory_order_relaxed)) {
    if (has_new_tasks_.load(std::memory_order_relaxed)) AdoptNewTasks();
    bool waiting = false;
    bool polling = false;
    if (StepTasks(&waiting, &polling)) {
      last_progress = Clock::now();
      if (++steps % kStepsBetweenPolls == 0) Poll(0);
    } else if ((waiting || polling) && Clock::now() - last_progress < spin_) {
      Relax();
      if (++steps % kStepsBetweenPolls == 0) Poll(0);
    } else if (polling) {
      Nap((Clock::now() - last_progress) / kNapFraction);
    } else {
      Sleep();
      last_progress = Clock::now();
    }
  }
}

void Proxy::AdoptNewTasks() {
  std::vector<std::shared_ptr<Task>> added;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    added.swap(new_tasks_);
    has_new_tasks_.store(false);
  }
  for (std::shared_ptr<Task>& task : added) {
    for (int fd : task->poll_fds()) {
      epoll_event event = {};
      event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
      event.data.ptr = task.get();
      // Some test transports use descriptors that cannot be polled; the doorbell covers them.
      (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
    }
    task->wanted_.store(true);
    tasks_.push_back(std::move(task));
  }
}

bool Proxy::StepTasks(bool* waiting, bool* polling) {
  bool moved = false;
  for (const std::shared_ptr<Task>& task : tasks_) {
    const bool wanted = task->wanted_.load(std::memory_order_relaxed) &&
                        task->wanted_.exchange(false, std::memory_order_acq_rel);
    if (!wanted && task->pace_ == Pace::kIdle) continue;
    const uint64_t steps = steps_.load(std::memory_order_relaxed);
    steps_.store(steps + 1, std::memory_order_relaxed);
    task->pace_ = task->Step();
    steps_.store(steps + 2, std::memory_order_relaxed);
    moved |= task->pace_ == Pace::kBusy;
    *waiting |= task->pace_ == Pace::kWaiting;
    *polling |= task->pace_ == Pace::kPolling;
  }
  return moved;
}

void Proxy::Poll(int timeout_ms) {
  epoll_event events[32];
  const int count = ::epoll_wait(epoll_.get(), events, 32, timeout_ms);
  for (int i = 0; i < count; ++i) {
    Task* task = static_cast<Task*>(events[i].data.ptr);
    if (task == nullptr) continue;
    task->OnReady();
    task->wanted_.store(true);
  }
  // Edge triggered: the eventfd need not be read, each write is a new edge.
}

void Proxy::Nap(Duration duration) {
  // By default the kernel lets short sleeps last 50 us longer. Set for this thread only.
  thread_local const bool precise = ::prctl(PR_SET_TIMERSLACK, 1000ul, 0ul, 0ul, 0ul) == 0;
  (void)precise;
  const auto nap = std::clamp<Duration>(duration, kShortestNap, kLongestNap);
  const timespec time = {0, std::chrono::duration_cast<std::chrono::nanoseconds>(nap).count()};
  pollfd wake = {epoll_.get(), POLLIN, 0};
  sleeping_.store(true, std::memory_order_seq_cst);
  bool ready = stop_.load() || has_new_tasks_.load();
  for (const std::shared_ptr<Task>& task : tasks_) {
    ready |= task->wanted_.load(std::memory_order_seq_cst);
  }
  if (!ready) (void)::ppoll(&wake, 1, &time, nullptr);
  sleeping_.store(false, std::memory_order_relaxed);
  Poll(0);
}

void Proxy::Sleep() {
  sleeping_.store(true, std::memory_order_seq_cst);
  bool ready = stop_.load() || has_new_tasks_.load();
  for (const std::shared_ptr<Task>& task : tasks_) {
    if (task->wanted_.load(std::memory_order_seq_cst)) ready = true;
    if (task->pace_ == Pace::kWaiting && task->ArmDoorbell()) ready = true;
  }
  Poll(ready ? 0 : kMaxSleepMs);
  sleeping_.store(false, std::memory_order_relaxed);
}

}  // namespace hetccl::proxy
