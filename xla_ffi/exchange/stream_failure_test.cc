// Exchanges of GPUs that fail: the streams go on, with poison, and the GPU stays usable.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <string>
#include <thread>

#include "xla_ffi/exchange/stream_world.h"

namespace hetccl {
namespace {

using device::Vendor;
using std::chrono::milliseconds;
using std::chrono::seconds;

class StreamFailureTest : public StreamFixture {
 protected:
  bool cuda() const { return GetParam().vendor == Vendor::kCuda; }

  // A start and done whose peer never comes.
  DeviceProgram::Swap StartAlone(size_t count, const Call& call = {}) {
    world_->AddSwap(call.plan, "psum/data f32[" + std::to_string(count) + "]", count);
    DeviceProgram::Swap swap = left_->Make(call.plan, count, 3);
    EXPECT_OK(left_->Start(swap, call));
    EXPECT_OK(left_->Done(swap));
    return swap;
  }
  void ExpectPoison(const DeviceProgram::Swap& swap) {
    const std::vector<float> values = left_->Read(swap.received, swap.bytes);
    ASSERT_EQ(values.size(), swap.bytes / sizeof(float));
    for (float value : values) ASSERT_TRUE(std::isnan(value)) << value;
  }
  // The device, its space and a new world on it work.
  void ExpectUsable() {
    EngineOptions options = TestWorld::Quick();
    Connect(options);
    world_->AddSwap(9, "psum/data f32[5000]", 5000);
    Both both = StartBoth({9}, 5000, 1, 2);
    DoneBoth(both);
    ExpectSwapped(both);
  }
};

TEST_P(StreamFailureTest, ThePeersDeathPoisonsAndReleases) {
  DeviceProgram::Swap swap = StartAlone(100000);
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_FALSE(left_->Ends(milliseconds(1))) << "nothing has arrived";
  right_.reset();
  world_->Destroy(1);
  const auto candidate = world_->engine(0).WaitFailure(seconds(10));
  ASSERT_TRUE(candidate.has_value());
  EXPECT_EQ(candidate->kind(), ErrorKind::kPeerLost);
  EXPECT_NE(candidate->message().find("right/0 rank 1"), std::string::npos);
  ExpectPoison(swap);
  // The error is there for check and for the next exchange.
  EXPECT_EQ(CheckOnStream(world_->engine(0), 0, left_->stream(), {}).kind(), ErrorKind::kPeerLost);
  DeviceProgram::Swap next = left_->Make(1, 100000, 3);
  EXPECT_OK(left_->Start(next));
  EXPECT_OK(left_->Done(next));
  ExpectPoison(next);
  ExpectUsable();
}

TEST_P(StreamFailureTest, ATimeOutPoisonsAndReleases) {
  EngineOptions options = TestWorld::Quick();
  options.arrival_timeout_s = 0.2;
  Connect(options);
  DeviceProgram::Swap swap = StartAlone(5000);
  ExpectPoison(swap);
  EXPECT_EQ(world_->engine(0).failure().kind(), ErrorKind::kTimeout);
  ExpectUsable();
}

TEST_P(StreamFailureTest, TheArrivalBoundBeginsWhenTheDeviceComesToTheStart) {
  EngineOptions options = TestWorld::Quick();
  options.arrival_timeout_s = 0.3;
  Connect(options);
  world_->AddSwap(1, "psum/data f32[5000]", 5000);
  Both first = StartBoth({1}, 5000, 1, 2);
  DoneBoth(first);
  ExpectSwapped(first);
  if (right_ == nullptr) return;  // a host has come to the start when it posts
  control_.Delay(cuda() ? "cuMemsetD32Async" : "hipMemsetD32Async",
                 250000);  // twice before a start
  Both both = StartBoth({1}, 5000, 3, 4);
  control_.Delay(cuda() ? "cuMemsetD32Async" : "hipMemsetD32Async", 0);
  DoneBoth(both);
  ExpectSwapped(both);
  EXPECT_TRUE(world_->engine(0).failure().ok()) << world_->engine(0).failure().message();
}

TEST_P(StreamFailureTest, ClosingReleasesEveryStream) {
  std::vector<DeviceProgram::Swap> swaps;
  for (uint32_t i = 0; i < 5; ++i) swaps.push_back(StartAlone(3000, {1, 5, i}));
  EXPECT_OK(world_->engine(0).Close(seconds(10)));
  for (const DeviceProgram::Swap& swap : swaps) ExpectPoison(swap);
  ExpectUsable();
}

TEST_P(StreamFailureTest, AFailedExchangeThatHasNotStartedIsPoisonedOnlyThen) {
  Both first = [&] {
    world_->AddSwap(1, "psum/data f32[3000]", 3000);
    Both both = StartBoth({1}, 3000, 1, 2);
    DoneBoth(both);
    return both;
  }();
  ExpectSwapped(first);
  const char* fill = cuda() ? "cuMemsetD32Async" : "hipMemsetD32Async";
  DeviceProgram::Swap swap = left_->Make(1, 3000, 3);
  ASSERT_TRUE(left_->Ends());
  control_.Delay(fill, 200000);
  left_->Fill(swap.received, 3000, 8);  // an earlier use of the buffer, still to come
  control_.Delay(fill, 0);
  EXPECT_OK(left_->Start(swap));
  EXPECT_OK(left_->Done(swap));
  world_->engine(0).Abort(Status(ErrorKind::kAborted, "agreed elsewhere"));
  ExpectPoison(swap);
}

TEST_P(StreamFailureTest, AFailingCopyIsTheWorldsFailure) {
  world_->AddSwap(1, "psum/data f32[9000]", 9000);
  Both first = StartBoth({1}, 9000, 1, 2);
  DoneBoth(first);
  ExpectSwapped(first);
  control_.Fail(cuda() ? "cuMemcpyDtoHAsync_v2" : "hipMemcpyDtoHAsync", 2, 1);
  DeviceProgram::Swap swap = left_->Make(1, 9000, 3);
  EXPECT_OK(left_->Start(swap));
  EXPECT_OK(left_->Done(swap));
  ExpectPoison(swap);
  const Status error = world_->engine(0).failure();
  EXPECT_NE(error.message().find("emcpyDtoHAsync"), std::string::npos) << error.message();
  ExpectUsable();
}

TEST_P(StreamFailureTest, PoisonThatComesTooLateEndsTheProcess) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EngineOptions options = TestWorld::Quick();
  options.give_back_s = 0.3;
  Connect(options);
  const auto fail = [&] {
    StartAlone(5000);
    control_.Delay(cuda() ? "cuMemsetD32Async" : "hipMemsetD32Async", 3000000);
    world_->engine(0).Abort(Status(ErrorKind::kTimeout, "agreed elsewhere"));
    (void)left_->Ends();
  };
  EXPECT_EXIT(fail(), ::testing::ExitedWithCode(1),
              "timeout: agreed elsewhere(.|\n)*cannot be poisoned(.|\n)*this process ends");
}

TEST_P(StreamFailureTest, ACopyThatDoesNotEndBehindAFailureEndsTheProcess) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EngineOptions options = TestWorld::Quick();
  options.give_back_s = 0.3;
  Connect(options);
  const auto fail = [&] {
    world_->AddSwap(1, "psum/data f32[9000]", 9000);
    control_.Delay(cuda() ? "cuMemcpyDtoHAsync_v2" : "hipMemcpyDtoHAsync", 5000000);
    Both both = StartBoth({1}, 9000, 1, 2);
    EXPECT_OK(left_->Done(both.left));
    std::this_thread::sleep_for(milliseconds(100));
    world_->engine(0).Abort(Status(ErrorKind::kTimeout, "agreed elsewhere"));
    (void)left_->Ends();
  };
  EXPECT_EXIT(fail(), ::testing::ExitedWithCode(1),
              "timeout: agreed elsewhere(.|\n)*psum/data(.|\n)*this process ends");
}

TEST_P(StreamFailureTest, AProgramThatDiedBeforeItsDoneShowsAtTheNextUseOfItsMemory) {
  world_->AddSwap(1, "psum/data f32[3000]", 3000);
  const auto await_all = [&] {
    const TimePoint deadline = Clock::now() + seconds(10);
    while (world_->engine(0).Stats().in_flight > 0 && Clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_EQ(world_->engine(0).Stats().in_flight, 0);
  };
  // Complete: nothing moves any more, and the next program may have the memory.
  Both dead = StartBoth({1, 5, 0}, 3000, 1, 2);
  await_all();
  Both both = StartBoth({1, 5, 1}, 3000, 3, 4);
  if (right_ != nullptr) EXPECT_OK(right_->Done(dead.right));
  EXPECT_OK(left_->Start(dead.left, {1, 5, 2}));
  DeviceProgram::Swap answer;
  std::unique_ptr<Running> host;
  if (right_ != nullptr) {
    answer = right_->Make(1, 3000, 6);
    EXPECT_OK(right_->Start(answer, {1, 5, 2}));
  } else {
    host = world_->Start(1, {1, 5, 2}, 3000, 6);
  }
  EXPECT_OK(left_->Done(dead.left));
  EXPECT_EQ(left_->Read(dead.left.received, dead.left.bytes), std::vector<float>(3000, 6));
  if (right_ != nullptr) EXPECT_OK(right_->Done(answer));
  DoneBoth(both);
  ExpectSwapped(both);
  EXPECT_FALSE(left_->Done(dead.left).ok()) << "the dead one is still known";
  // Under way: the peer's bytes would come into somebody else's memory.
  DeviceProgram::Swap dying = left_->Make(1, 3000, 3);
  EXPECT_OK(left_->Start(dying, {1, 5, 3}));
  DeviceProgram::Swap next = left_->Make(1, 3000, 3);
  next.received = dying.sent + 4;
  const Status status = left_->Start(next, {1, 5, 4});
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("ended between start and done"), std::string::npos);
  const auto candidate = world_->engine(0).WaitFailure(seconds(1));
  ASSERT_TRUE(candidate.has_value());
  EXPECT_EQ(candidate->message(), status.message());
  await_all();  // the failure ends it, and only then the test may free the memory
}

TEST_P(StreamFailureTest, NothingTouchesTheBuffersOfAHandlerThatFailed) {
  world_->AddSwap(1, "psum/data f32[3000]", 3000);
  Both first = StartBoth({1, 5, 0}, 3000, 1, 2);
  DoneBoth(first);
  ExpectSwapped(first);
  const char* copy = cuda() ? "cuMemcpyDtoDAsync_v2" : "hipMemcpyDtoDAsync";
  DeviceProgram::Swap swap = left_->Make(1, 3000, 3);
  control_.Fail(copy, 1, 1);
  EXPECT_FALSE(left_->Start(swap, {1, 5, 1}).ok());
  EXPECT_EQ(world_->engine(0).Stats().in_flight, 0) << "begun, and its program has ended";
  const bool memops = GetParam().sync == "memops";
  const char* hold = memops ? (cuda() ? "cuStreamWaitValue32_v2" : "hipStreamWaitValue32")
                            : (cuda() ? "cuLaunchHostFunc" : "hipLaunchHostFunc");
  EXPECT_OK(left_->Start(swap, {1, 5, 1}));
  control_.Fail(hold, 1, 1);
  const Status status = left_->Done(swap);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(world_->engine(0).Stats().in_flight, 0) << "still moves, and its program has ended";
  EXPECT_EQ(world_->engine(0).failure().message(), status.message());
  ExpectUsable();
}

TEST_P(StreamFailureTest, ACopyThatDoesNotEndNamesTheQueues) {
  EngineOptions options = TestWorld::Quick();
  options.timeout_s = 0.3;
  options.arrival_timeout_s = 5;  // the peer begins only behind its delayed copy
  Connect(options);
  world_->AddSwap(1, "psum/data f32[9000]", 9000);
  control_.Delay(cuda() ? "cuMemcpyHtoDAsync_v2" : "hipMemcpyHtoDAsync", 900000);
  Both both = StartBoth({1}, 9000, 1, 2);
  const auto candidate = world_->engine(0).WaitFailure(seconds(10));
  control_.Delay(cuda() ? "cuMemcpyHtoDAsync_v2" : "hipMemcpyHtoDAsync", 0);
  ASSERT_TRUE(candidate.has_value());
  EXPECT_EQ(candidate->kind(), ErrorKind::kTimeout);
  // The copy out may be marked behind it: host functions share one thread.
  EXPECT_NE(candidate->message().find("of 36000 bytes"), std::string::npos) << candidate->message();
  EXPECT_NE(candidate->message().find("CUDA_DEVICE_MAX_CONNECTIONS"), std::string::npos)
      << candidate->message();
  DoneBoth(both);
  EXPECT_TRUE(left_->Ends(seconds(10)));
}

TEST_P(StreamFailureTest, AFailingCallOfAHandlerIsItsError) {
  world_->AddSwap(1, "psum/data f32[10]", 10);
  DeviceProgram::Swap swap = left_->Make(1, 10, 3);
  const bool memops = GetParam().sync == "memops";
  const char* mark = memops ? (cuda() ? "cuStreamWriteValue32_v2" : "hipStreamWriteValue32")
                            : (cuda() ? "cuEventRecord" : "hipEventRecord");
  control_.Fail(mark, 1, 1);
  const Status status = left_->Start(swap);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find(memops ? "WriteValue32" : "EventRecord"), std::string::npos);
  ExpectUsable();
}

TEST_P(StreamFailureTest, MovedBuffersAreAnErrorAndTheStreamStillWaits) {
  world_->AddSwap(1, "psum/data f32[3000]", 3000);
  Both both = StartBoth({1}, 3000, 1, 2);
  DeviceProgram::Swap moved = both.left;
  moved.received = left_->Allocate(moved.bytes);
  const Status status = left_->Done(moved);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("moved a buffer"), std::string::npos);
  if (right_ != nullptr) EXPECT_OK(right_->Done(both.right));
  ExpectSwapped(both);  // start's buffers
  EXPECT_EQ(world_->engine(0).Stats().copied, 1u);
}

TEST_P(StreamFailureTest, HostFunctionsServeOneGpuOfAProcess) {
  device::StreamSpaceOptions open;
  open.vendor = GetParam().vendor;
  open.ordinal = 1;
  open.sync = GetParam().sync;
  open.library = twin::Library(open.vendor);
  std::shared_ptr<device::StreamSpace> second;
  ASSERT_TRUE(device::StreamSpace::Open(open, &second).ok());
  const Status status = world_->engine(0).SetLocalDevice(1, 7, second);
  EXPECT_EQ(status.ok(), GetParam().sync == "memops");
}

TEST_P(StreamFailureTest, IntegersAreZeroOnRequest) {
  EngineOptions options = TestWorld::Quick();
  options.exit_on_integer_failure = false;
  Connect(options);
  world_->AddSwap(1, "psum/data i32[3000]", 3000);
  DeviceProgram::Swap swap = left_->Make(1, 3000, 3);
  swap.poison = {{}, 0};
  EXPECT_OK(left_->Start(swap));
  EXPECT_OK(left_->Done(swap));
  world_->engine(0).Abort(Status(ErrorKind::kTimeout, "agreed elsewhere"));
  EXPECT_EQ(left_->Read(swap.received, swap.bytes), std::vector<float>(3000, 0));
}

TEST_P(StreamFailureTest, IntegersEndTheProcessOtherwise) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto fail = [&] {
    world_->AddSwap(1, "psum/data i32[3000]", 3000);
    DeviceProgram::Swap swap = left_->Make(1, 3000, 3);
    swap.poison = {{}, 0};
    EXPECT_OK(left_->Start(swap));
    EXPECT_OK(left_->Done(swap));
    world_->engine(0).Abort(Status(ErrorKind::kTimeout, "agreed elsewhere"));
    (void)left_->Ends();
  };
  EXPECT_EXIT(fail(), ::testing::ExitedWithCode(1), "timeout: agreed elsewhere(.|\n)*INTEGER");
}

INSTANTIATE_TEST_SUITE_P(Twin, StreamFailureTest, ::testing::ValuesIn(Setups()),
                         [](const auto& info) { return Name(info.param); });

}  // namespace
}  // namespace hetccl
