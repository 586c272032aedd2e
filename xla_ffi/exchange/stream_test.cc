// Exchanges between GPUs, and of a GPU with a host, over the test twin: every size, both vendors'
// names, both transports, both ways to hold a stream.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <tuple>

#include "xla_ffi/exchange/stream_world.h"

namespace hetccl {
namespace {

using device::Vendor;
using std::chrono::milliseconds;

using StreamTest = StreamFixture;

TEST_P(StreamTest, SwapsDataOfManySizes) {
  uint64_t plan = 1;
  for (size_t count : {0, 1, 960, 961, 1000, 1024, 5000, 100000}) {
    world_->AddSwap(plan, "psum/data f32[" + std::to_string(count) + "]", count);
    for (int repeat = 0; repeat < 3; ++repeat) {
      Both both = StartBoth({plan}, count, 10.0f + repeat, 20.0f + repeat);
      DoneBoth(both);
      ExpectSwapped(both);
    }
    ++plan;
  }
  EXPECT_TRUE(world_->engine(0).failure().ok());
  EXPECT_EQ(world_->engine(0).Stats().in_flight, 0);
  EXPECT_EQ(world_->engine(0).Stats().copied, 0u);
}

TEST_P(StreamTest, ManyExchangesInFlightKeepTheirData) {
  world_->AddSwap(1, "psum/data f32[3000]", 3000);
  std::vector<Both> all;
  for (uint32_t i = 0; i < 40; ++i) {
    all.push_back(StartBoth({1, 5, i}, 3000, 1.0f + i, 100.0f + i));
  }
  for (Both& both : all) DoneBoth(both);
  for (Both& both : all) ExpectSwapped(both);
}

TEST_P(StreamTest, DonesInAnotherOrderFindTheirExchanges) {
  world_->AddSwap(1, "psum/data f32[3000]", 3000);
  std::vector<Both> all;
  for (uint32_t i = 0; i < 6; ++i) all.push_back(StartBoth({1, 5, i}, 3000, 1.0f + i, 9.0f + i));
  for (size_t i = all.size(); i > 0; --i) DoneBoth(all[i - 1]);
  for (Both& both : all) ExpectSwapped(both);
  EXPECT_EQ(world_->engine(0).Stats().copied, 0u);
}

TEST_P(StreamTest, CallsReturnWhileTheDeviceIsBusyAndTheDataIsWhatItWillBe) {
  world_->AddSwap(1, "psum/data f32[20000]", 20000);
  for (DeviceProgram* program : {left_.get(), right_.get()}) {
    if (program == nullptr) continue;
    std::shared_ptr<device::Hold> hold;  // the first hold of a stream may wait
    EXPECT_OK(program->space().HoldQueue(program->stream(), &hold));
  }
  const char* call = GetParam().vendor == Vendor::kCuda ? "cuMemsetD32Async" : "hipMemsetD32Async";
  control_.Delay(call, 100000);  // the kernel that makes what is sent
  const TimePoint before = Clock::now();
  Both both = StartBoth({1}, 20000, 5, 6);
  DoneBoth(both);
  EXPECT_LT(Clock::now() - before, milliseconds(90)) << "a call waited for the device";
  ExpectSwapped(both);
  control_.Delay(call, 0);
}

TEST_P(StreamTest, WhatIsQueuedBehindDoneSeesTheData) {
  world_->AddSwap(1, "psum/data f32[20000]", 20000);
  Both both = StartBoth({1}, 20000, 3, 4);
  DoneBoth(both);
  // Queued at once: what a fused kernel behind done would read.
  std::byte* copy = left_->Allocate(both.left.bytes);
  EXPECT_OK(left_->space().Copy(copy, both.left.received, both.left.bytes, left_->stream()));
  left_->Fill(both.left.sent, both.count, 77);  // its memory is the program's again
  ExpectSwapped(both);
  EXPECT_EQ(left_->Read(copy, both.left.bytes), std::vector<float>(both.count, 4));
}

TEST_P(StreamTest, NothingIsAllocatedAfterWarmUpAndNoStreamIsAdded) {
  world_->AddSwap(1, "psum/data f32[5000]", 5000);
  Both first = StartBoth({1}, 5000, 1, 2);
  DoneBoth(first);
  ExpectSwapped(first);
  const auto before = world_->engine(0).Stats().devices.at(0).space;
  const int64_t streams = control_.Live("streams");
  const int64_t events = control_.Live("events");
  const int64_t host_bytes = control_.Live("host_bytes");
  for (int i = 0; i < 50; ++i) {
    Both both = first.host == nullptr ? std::move(first) : StartBoth({1}, 5000, 1, 2);
    if (both.host == nullptr) {
      EXPECT_OK(left_->Start(both.left, {1}));
      EXPECT_OK(right_->Start(both.right, {1}));
    }
    DoneBoth(both);
    ExpectSwapped(both);
    if (both.host == nullptr) first = std::move(both);
  }
  EXPECT_EQ(world_->engine(0).Stats().devices.at(0).space, before);
  EXPECT_EQ(before.at("streams"), 3);
  EXPECT_EQ(control_.Live("streams"), streams);
  EXPECT_EQ(control_.Live("events"), events);
  EXPECT_EQ(control_.Live("host_bytes"), host_bytes);
}

TEST_P(StreamTest, SurvivesDelaysByChance) {
  world_->AddSwap(1, "psum/data f32[9000]", 9000);
  control_.Set("jitter_us", 300);
  for (uint32_t i = 0; i < 5; ++i) {
    Both one = StartBoth({1, 5, 2 * i}, 9000, 1.0f + i, 2.0f + i);
    Both other = StartBoth({1, 5, 2 * i + 1}, 9000, 3.0f + i, 4.0f + i);
    DoneBoth(one);
    DoneBoth(other);
    ExpectSwapped(one);
    ExpectSwapped(other);
  }
  control_.Set("jitter_us", 0);
}

INSTANTIATE_TEST_SUITE_P(Twin, StreamTest, ::testing::ValuesIn(Setups()),
                         [](const auto& info) { return Name(info.param); });

}  // namespace
}  // namespace hetccl
