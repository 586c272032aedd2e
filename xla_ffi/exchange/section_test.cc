// Driver calls that wait for a whole GPU, beside exchanges that hold its stream.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "xla_ffi/exchange/stream_world.h"

namespace hetccl {
namespace {

using device::Section;
using std::chrono::milliseconds;
using std::chrono::seconds;

class SectionTest : public StreamFixture {
 protected:
  ~SectionTest() override { control_.Set("memory_waits", 0); }

  static constexpr size_t kCount = 20000;

  // The peer's side of an exchange that left has started.
  struct Answer {
    DeviceProgram::Swap swap;
    std::unique_ptr<Running> host;
  };
  Answer Reply(const Call& call) {
    Answer answer;
    if (right_ == nullptr) {
      answer.host = world_->Start(1, call, kCount, 2);
    } else {
      answer.swap = right_->Make(call.plan, kCount, 2);
      EXPECT_OK(right_->Start(answer.swap, call));
      EXPECT_OK(right_->Done(answer.swap));
    }
    return answer;
  }
  void Expect(float value, const DeviceProgram::Swap& swap) {
    EXPECT_EQ(left_->Read(swap.received, swap.bytes), std::vector<float>(kCount, value));
  }
};

TEST_P(SectionTest, InASectionDoneWaitsOnTheHostAndLoadsPass) {
  world_->AddSwap(1, "psum/data f32[20000]", kCount);
  for (uint32_t i = 0; i < 3; ++i) {
    const Section section(&left_->space().exclusion());
    ASSERT_TRUE(left_->space().exclusion().AwaitNoHold(seconds(10)));
    const Call call{1, 5, i};
    DeviceProgram::Swap swap = left_->Make(1, kCount, 1);
    EXPECT_OK(left_->Start(swap, call));
    std::atomic<bool> answered{false};
    Answer answer;
    std::thread peer([&] {
      std::this_thread::sleep_for(milliseconds(20));
      answered = true;
      answer = Reply(call);
    });
    EXPECT_OK(left_->Done(swap));
    EXPECT_TRUE(answered) << "done did not wait for the exchange";
    // A kernel behind done that is launched for the first time.
    EXPECT_EQ(control_.Load(0), 0);
    peer.join();
    Expect(2, swap);
  }
  EXPECT_TRUE(world_->engine(0).failure().ok());
}

TEST_P(SectionTest, ASectionWaitsForTheHoldsThatItFinds) {
  world_->AddSwap(1, "psum/data f32[20000]", kCount);
  DeviceProgram::Swap swap = left_->Make(1, kCount, 1);
  EXPECT_OK(left_->Start(swap, {1}));
  EXPECT_OK(left_->Done(swap));
  std::atomic<bool> loaded{false};
  std::thread loading([&] {
    const Section section(&left_->space().exclusion());
    EXPECT_TRUE(left_->space().exclusion().AwaitNoHold(seconds(10)));
    EXPECT_EQ(control_.Load(0), 0);
    loaded = true;
  });
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_FALSE(loaded) << "loaded while a stream was held";
  Answer answer = Reply({1});
  loading.join();
  Expect(2, swap);
}

TEST_P(SectionTest, SlotsComeAndGoWhileNothingIsHeld) {
  world_->AddSwap(1, "psum/data f32[20000]", kCount);
  device::StreamSpace& space = left_->space();
  std::unique_ptr<device::SlotMemory> pinned, on_device;
  device::DmaBuf dmabuf;
  const std::function<void()> changes[] = {
      [&] { EXPECT_OK(space.Allocate(4096, &pinned)); },
      [&] { EXPECT_OK(space.AllocateOnDevice(4096, &on_device, &dmabuf)); },
      [&] { pinned.reset(); },
      [&] { on_device.reset(); },
  };
  uint32_t index = 0;
  for (const std::function<void()>& change : changes) {
    const Call call{1, 5, index++};
    DeviceProgram::Swap swap = left_->Make(1, kCount, 1);
    EXPECT_OK(left_->Start(swap, call));
    EXPECT_OK(left_->Done(swap));
    control_.Set("memory_waits", 1);
    std::atomic<bool> changed{false};
    std::thread changing([&] {
      change();
      changed = true;
    });
    std::this_thread::sleep_for(milliseconds(50));
    EXPECT_FALSE(changed) << "asked the driver while a stream was held";
    control_.Set("memory_waits", 0);
    Answer answer = Reply(call);
    changing.join();
    Expect(2, swap);
  }
}

// The peer dials only now, behind a done that no section covers: its channel's slots wait until
// nothing is held.
TEST_P(SectionTest, DoneDoesNotHoldUpTheChannelThatItWaitsFor) {
  Open(TestWorld::Quick());
  device::Space& left = world_->engine(0).SpaceOf(0);
  device::Space& right = world_->engine(1).SpaceOf(1);
  world_->Connect(0, MakeWire(GetParam().wire, left, right));
  world_->AddSwap(1, "psum/data f32[20000]", kCount);
  DeviceProgram::Swap swap = left_->Make(1, kCount, 1);
  EXPECT_OK(left_->Start(swap, {1}));
  Answer answer;
  std::thread peer([&] {
    std::this_thread::sleep_for(milliseconds(50));
    world_->Connect(1, MakeWire(GetParam().wire, right, left));
    answer = Reply({1});
  });
  EXPECT_OK(left_->Done(swap));
  peer.join();
  Expect(2, swap);
  EXPECT_TRUE(world_->engine(0).failure().ok());
}

// What sections are for: without one the load and the held stream wait for each other, and the
// failure that ends this cannot be cleaned up, as the driver lets nobody in.
TEST_P(SectionTest, WithoutASectionALoadEndsTheProcess) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EngineOptions options = TestWorld::Quick();
  options.timeout_s = options.arrival_timeout_s = 0.3;
  options.give_back_s = 0.3;
  Connect(options);
  const auto load = [&] {
    world_->AddSwap(1, "psum/data f32[20000]", kCount);
    DeviceProgram::Swap swap = left_->Make(1, kCount, 1);
    EXPECT_OK(left_->Start(swap, {1}));
    EXPECT_OK(left_->Done(swap));
    std::thread loading([&] { (void)control_.Load(0); });
    std::this_thread::sleep_for(milliseconds(50));
    Answer answer = Reply({1});
    loading.join();
  };
  EXPECT_EXIT(load(), ::testing::ExitedWithCode(1), "timeout: psum(.|\n)*this process ends");
}

TEST_P(SectionTest, HoweverManyAreUnderWayNoMemoryIsAskedFor) {
  if (right_ == nullptr) return;
  constexpr uint32_t kMany = 300;  // more than there are flags
  world_->AddSwap(1, "psum/data f32[20000]", kCount);
  const auto before = world_->engine(0).Stats().devices.at(0).space;
  std::vector<DeviceProgram::Swap> swaps;
  for (uint32_t i = 0; i < kMany; ++i) swaps.push_back(left_->Make(1, 16, 1));
  world_->AddSwap(2, "psum/data f32[16]", 16);
  std::atomic<uint32_t> done{0};
  std::thread program([&] {
    for (uint32_t i = 0; i < kMany; ++i) {
      swaps[i].plan = 2;
      EXPECT_OK(left_->Start(swaps[i], {2, 5, i}));
      EXPECT_OK(left_->Done(swaps[i]));
      ++done;
    }
  });
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_LT(done, kMany) << "there were flags for all";
  std::vector<DeviceProgram::Swap> answers;
  for (uint32_t i = 0; i < kMany; ++i) answers.push_back(right_->Make(2, 16, 2));
  for (uint32_t i = 0; i < kMany; ++i) EXPECT_OK(right_->Start(answers[i], {2, 5, i}));
  program.join();
  for (uint32_t i = 0; i < kMany; ++i) EXPECT_OK(right_->Done(answers[i]));
  for (const DeviceProgram::Swap& swap : swaps) {
    EXPECT_EQ(left_->Read(swap.received, swap.bytes), std::vector<float>(16, 2));
  }
  EXPECT_EQ(world_->engine(0).Stats().devices.at(0).space, before);
}

TEST_P(SectionTest, SectionsMayMeet) {
  world_->AddSwap(1, "psum/data f32[20000]", kCount);
  std::vector<std::thread> loading;
  for (int i = 0; i < 3; ++i) {
    loading.emplace_back([&] {
      for (int j = 0; j < 5; ++j) {
        const Section section(&left_->space().exclusion());
        EXPECT_TRUE(left_->space().exclusion().AwaitNoHold(seconds(10)));
        EXPECT_EQ(control_.Load(0), 0);
      }
    });
  }
  for (uint32_t i = 0; i < 20; ++i) {
    Both both = StartBoth({1, 5, i}, kCount, 1, 2);
    DoneBoth(both);
    ExpectSwapped(both);
  }
  for (std::thread& thread : loading) thread.join();
}

INSTANTIATE_TEST_SUITE_P(Twin, SectionTest, ::testing::ValuesIn(Setups()),
                         [](const auto& info) { return Name(info.param); });

}  // namespace
}  // namespace hetccl
