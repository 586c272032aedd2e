#include "xla_ffi/common/elastic_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>

namespace hetccl {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(ElasticPool, TasksThatWaitForEachOtherAllRun) {
  // Each task waits for the one posted after it: any bounded pool would deadlock.
  constexpr int kTasks = 40;
  ElasticPool pool("test");
  std::vector<std::promise<void>> done(kTasks + 1);
  for (int i = 0; i < kTasks; ++i) {
    pool.Post([&done, i] {
      done[i + 1].get_future().wait();
      done[i].set_value();
    });
  }
  pool.Post([&done] { done[kTasks].set_value(); });
  EXPECT_EQ(done[0].get_future().wait_for(seconds(20)), std::future_status::ready);
  EXPECT_EQ(pool.Shutdown(seconds(5)), 0);
}

TEST(ElasticPool, IdleThreadsAreReusedThenRetire) {
  ElasticPool pool("test", milliseconds(50));
  for (int i = 0; i < 20; ++i) {
    std::promise<void> ran;
    pool.Post([&ran] { ran.set_value(); });
    ran.get_future().wait();
    std::this_thread::sleep_for(milliseconds(2));
  }
  EXPECT_LE(pool.size(), 3u);
  for (int i = 0; i < 500 && pool.size() > 0; ++i) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_EQ(pool.size(), 0u);
  // And the pool still works.
  std::promise<void> ran;
  pool.Post([&ran] { ran.set_value(); });
  EXPECT_EQ(ran.get_future().wait_for(seconds(5)), std::future_status::ready);
}

TEST(ElasticPool, ShutdownRunsWhatWasPosted) {
  std::atomic<int> ran{0};
  ElasticPool pool("test");
  for (int i = 0; i < 10; ++i) {
    pool.Post([&ran] {
      std::this_thread::sleep_for(milliseconds(5));
      ++ran;
    });
  }
  EXPECT_EQ(pool.Shutdown(seconds(10)), 0);
  EXPECT_EQ(ran, 10);
  EXPECT_EQ(pool.Shutdown(seconds(1)), 0);
}

TEST(ElasticPool, AfterShutdownTasksRunOnTheCaller) {
  ElasticPool pool("test");
  pool.Shutdown(seconds(1));
  std::thread::id where;
  pool.Post([&where] { where = std::this_thread::get_id(); });
  EXPECT_EQ(where, std::this_thread::get_id());
}

TEST(ElasticPool, ShutdownIsBoundedAndCountsWhatIsStuck) {
  auto release = std::make_shared<std::promise<void>>();
  auto released = std::make_shared<std::shared_future<void>>(release->get_future().share());
  auto ended = std::make_shared<std::promise<void>>();
  {
    ElasticPool pool("test");
    pool.Post([released, ended] {
      released->wait();
      ended->set_value();
    });
    EXPECT_EQ(pool.Shutdown(milliseconds(50)), 1);
  }
  // The task outlives the pool unharmed.
  release->set_value();
  EXPECT_EQ(ended->get_future().wait_for(seconds(5)), std::future_status::ready);
}

}  // namespace
}  // namespace hetccl
