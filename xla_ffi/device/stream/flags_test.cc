// Flags and marks, over the test twin of both vendors' drivers.
#include "xla_ffi/device/stream/flags.h"

#include <gtest/gtest.h>

#include <set>
#include <thread>
#include <vector>

#include "xla_ffi/device/twin/on_twin.h"

namespace hetccl::device {
namespace {

class FlagsTest : public twin::OnTwin {};
INSTANTIATE_ON_TWIN(FlagsTest);

TEST_P(FlagsTest, HoldUntilTheEndOfTheirCounters) {
  Allocations allocations;
  FlagPool pool(*gpu, StreamSync::kMemops, &allocations, UINT32_MAX - 3);
  ASSERT_OK(pool.Reserve(2));
  const Stream stream = NewStream();
  int holds = 0;
  for (; holds < 12; ++holds) {
    Flag* flag = pool.Acquire();
    if (flag == nullptr) break;
    ASSERT_OK(pool.Hold(flag, stream));
    Wait();
    ASSERT_FALSE(Done(stream)) << "hold " << holds << " does not hold";
    pool.Release(flag);
    ASSERT_OK(gpu->StreamSynchronize(stream));
  }
  // CUDA's comparison wraps around; HIP's does not, and a flag ends with its counter.
  EXPECT_EQ(holds, cuda() ? 12 : 6);
}

TEST_P(FlagsTest, AreAllocatedAtOnceAndSpareOnesAreLeft) {
  Allocations allocations;
  FlagPool pool(*gpu, StreamSync::kMemops, &allocations);
  ASSERT_OK(pool.Reserve(8));
  const int64_t calls = allocations.calls.load();
  EXPECT_EQ(calls, cuda() ? 1 : 8);
  for (int i = 0; i < 6; ++i) EXPECT_NE(pool.Acquire(2), nullptr);
  EXPECT_EQ(pool.Acquire(2), nullptr);
  EXPECT_NE(pool.Acquire(), nullptr);
  EXPECT_NE(pool.Acquire(), nullptr);
  EXPECT_EQ(pool.Acquire(), nullptr);
  EXPECT_EQ(allocations.calls.load(), calls);
}

TEST_P(FlagsTest, MarksThatStandInAStreamAreNotGivenOut) {
  for (const MarkKind kind : {MarkKind::kWord, MarkKind::kEvent}) {
    Allocations allocations;
    MarkPool pool(*gpu, kind, &allocations);
    ASSERT_OK(pool.Reserve(3));
    const int64_t calls = allocations.calls.load();
    const Signal signal = NewSignal();
    const Stream stream = NewStream();
    ASSERT_OK(gpu->StreamWaitValue32(stream, signal.device, 1, Compare::kAtLeast));
    Mark* standing = nullptr;
    ASSERT_OK(pool.Acquire(&standing));
    ASSERT_OK(pool.Record(standing, stream));
    pool.Release(standing);
    Mark* mark = nullptr;
    for (int i = 0; i < 2; ++i) {
      ASSERT_OK(pool.Acquire(&mark));
      EXPECT_NE(mark, standing);
    }
    const Status status = pool.Acquire(&mark);
    ASSERT_FALSE(status.ok());
    EXPECT_NE(status.message().find("3 exchanges are under way"), std::string::npos);
    EXPECT_NE(status.message().find("HETCCL_BUCKET_MB"), std::string::npos);
    Set(signal, 1);
    ASSERT_OK(gpu->StreamSynchronize(stream));
    ASSERT_OK(pool.Acquire(&mark));
    EXPECT_EQ(mark, standing);
    EXPECT_EQ(allocations.calls.load(), calls);
  }
}

// The channels of a process are set up side by side, each with marks of its own.
TEST_P(FlagsTest, MarksAreMadeForEverybodyWhoAsksAtOnce) {
  Allocations allocations;
  MarkPool pool(*gpu, MarkKind::kEvent, &allocations);
  constexpr int kThreads = 4;
  constexpr int kEach = 64;
  std::vector<std::vector<Mark*>> got(kThreads);
  std::vector<std::thread> threads;
  for (auto& marks : got) {
    threads.emplace_back([&] {
      ASSERT_OK(gpu->MakeCurrent());
      for (int i = 0; i < kEach; ++i) {
        Mark* mark = nullptr;
        ASSERT_OK(pool.AcquireOrMake(&mark));
        marks.push_back(mark);
      }
    });
  }
  std::set<Mark*> all;
  for (int i = 0; i < kThreads; ++i) {
    threads[i].join();
    all.insert(got[i].begin(), got[i].end());
  }
  EXPECT_EQ(all.size(), static_cast<size_t>(kThreads * kEach));
  EXPECT_EQ(all.count(nullptr), 0u);
  for (Mark* mark : all) pool.Release(mark);
  const int64_t calls = allocations.calls.load();
  Mark* again = nullptr;
  ASSERT_OK(pool.AcquireOrMake(&again));
  EXPECT_EQ(allocations.calls.load(), calls) << "free ones come first";
}

}  // namespace
}  // namespace hetccl::device
