#include "xla_ffi/proxy/proxy.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <thread>

namespace hetccl::proxy {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

class CountingTask : public Task {
 public:
  Pace Step() override {
    ++steps;
    if (todo.load() > 0) {
      --todo;
      return Pace::kBusy;
    }
    return waiting ? Pace::kWaiting : Pace::kIdle;
  }
  std::vector<int> poll_fds() const override { return {fd.get()}; }
  void OnReady() override { ++ready; }
  bool ArmDoorbell() override {
    ++armed;
    return false;
  }

  UniqueFd fd{::eventfd(0, EFD_NONBLOCK)};
  std::atomic<int> todo{0};
  std::atomic<int> steps{0};
  std::atomic<int> armed{0};
  std::atomic<int> ready{0};
  std::atomic<bool> waiting{false};
};

bool Eventually(const std::function<bool()>& condition) {
  const TimePoint deadline = Clock::now() + seconds(10);
  while (!condition() && Clock::now() < deadline) std::this_thread::sleep_for(microseconds(100));
  return condition();
}

class ProxyTest : public ::testing::Test {
 protected:
  ProxyTest() { proxy_.Add(task_); }
  ~ProxyTest() override { EXPECT_TRUE(proxy_.Stop(seconds(5))); }

  std::shared_ptr<CountingTask> task_ = std::make_shared<CountingTask>();
  Proxy proxy_{"test-proxy", microseconds(50)};
};

TEST_F(ProxyTest, StepsUntilNothingMoves) {
  task_->todo = 1000;
  task_->Notify();
  EXPECT_TRUE(Eventually([&] { return task_->todo == 0; }));
}

TEST_F(ProxyTest, NoNotificationIsLost) {
  for (int i = 0; i < 3000; ++i) {
    task_->todo = 1;
    task_->Notify();
    // Sleep lengths that meet the proxy spinning, falling asleep, and asleep.
    if (i % 3 == 1) std::this_thread::sleep_for(microseconds(i % 97));
    ASSERT_TRUE(Eventually([&] { return task_->todo == 0; })) << "after " << i;
  }
}

TEST_F(ProxyTest, ReadinessOfADescriptorLeadsToAStep) {
  ASSERT_TRUE(Eventually([&] { return task_->steps > 0; }));
  std::this_thread::sleep_for(milliseconds(5));
  const int before = task_->ready;
  const uint64_t one = 1;
  ASSERT_EQ(::write(task_->fd.get(), &one, sizeof(one)), 8);
  EXPECT_TRUE(Eventually([&] { return task_->ready > before; }));
}

TEST_F(ProxyTest, AWaitingTaskArmsItsDoorbellAndTheThreadSleeps) {
  task_->waiting = true;
  task_->Notify();
  ASSERT_TRUE(Eventually([&] { return task_->armed > 0; }));
  std::this_thread::sleep_for(milliseconds(20));
  const int steps = task_->steps;
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_LE(task_->steps - steps, 3) << "the thread spins instead of sleeping";
}

TEST_F(ProxyTest, AnIdleTaskIsLeftAlone) {
  ASSERT_TRUE(Eventually([&] { return task_->steps > 0; }));
  std::this_thread::sleep_for(milliseconds(20));
  const int steps = task_->steps;
  auto busy = std::make_shared<CountingTask>();
  busy->todo = 50;
  proxy_.Add(busy);
  ASSERT_TRUE(Eventually([&] { return busy->todo == 0; }));
  EXPECT_LE(task_->steps - steps, 2);
}

TEST_F(ProxyTest, StopIsIdempotent) {
  EXPECT_TRUE(proxy_.Stop(seconds(5)));
  EXPECT_TRUE(proxy_.Stop(seconds(5)));
}

}  // namespace
}  // namespace hetccl::proxy
