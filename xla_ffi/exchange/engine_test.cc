// Exchanges that work: data, order, matching, statistics, shutting down.
#include "xla_ffi/exchange/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "xla_ffi/exchange/test_world.h"

namespace hetccl {
namespace {

class EngineTest : public ::testing::TestWithParam<Wire> {};

TEST_P(EngineTest, SwapsDataOfManySizes) {
  TestWorld world;
  world.Connect(GetParam());
  uint64_t plan = 1;
  for (size_t count : {0, 1, 1000, 100000}) {
    world.AddSwap(plan, "psum/data f32[" + std::to_string(count) + "]", count);
    for (int repeat = 0; repeat < 3; ++repeat) {
      auto left = world.Start(0, {plan}, count, 10.0f + repeat);
      auto right = world.Start(1, {plan}, count, 20.0f + repeat);
      EXPECT_FALSE(left->Failed());
      EXPECT_FALSE(right->Failed());
      EXPECT_EQ(left->received, right->sent);
      EXPECT_EQ(right->received, left->sent);
    }
    ++plan;
  }
  EXPECT_TRUE(world.engine(0).failure().ok());
}

TEST_P(EngineTest, CountsPayloadExactly) {
  TestWorld world;
  world.Connect(GetParam());
  world.AddSwap(1, "psum/data f32[5000]", 5000);
  for (int i = 0; i < 4; ++i) {
    auto left = world.Start(0, {1}, 5000);
    auto right = world.Start(1, {1}, 5000);
    EXPECT_FALSE(left->Failed());
    EXPECT_FALSE(right->Failed());
  }
  const EngineStats stats = world.engine(0).Stats();
  ASSERT_EQ(stats.peers.count(1), 1u);
  EXPECT_EQ(stats.peers.at(1).bytes_sent, 4 * 20000u);
  EXPECT_EQ(stats.peers.at(1).bytes_received, 4 * 20000u);
  EXPECT_EQ(stats.peers.at(1).messages_sent, 4u);
  EXPECT_EQ(stats.peers.at(1).messages_received, 4u);
  EXPECT_EQ(stats.in_flight, 0);
}

TEST_P(EngineTest, ManyExchangesAtOnceKeepTheirData) {
  TestWorld world;
  world.Connect(GetParam());
  world.AddSwap(1, "psum/data f32[3000]", 3000);
  constexpr int kCount = 32;
  std::vector<std::unique_ptr<Running>> left, right;
  for (uint32_t i = 0; i < kCount; ++i) left.push_back(world.Start(0, {1, 5, i}, 3000, i));
  for (uint32_t i = 0; i < kCount; ++i) right.push_back(world.Start(1, {1, 5, i}, 3000, 100 + i));
  for (int i = 0; i < kCount; ++i) {
    EXPECT_FALSE(left[i]->Failed());
    EXPECT_FALSE(right[i]->Failed());
    EXPECT_EQ(left[i]->received, right[i]->sent);
    EXPECT_EQ(right[i]->received, left[i]->sent);
  }
}

TEST_P(EngineTest, ReceivesMayBePostedBeforeThePeerConnects) {
  TestWorld world;
  world.AddSwap(1, "psum/data f32[10]", 10);
  auto first = MakeWire(GetParam());
  auto second = MakeWire(GetParam());
  world.AddOutgoing(0, std::move(first.sender));
  auto left = world.Start(0, {1}, 10, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  world.AddIncoming(0, std::move(first.receiver));
  world.Connect(1, std::move(second));
  auto right = world.Start(1, {1}, 10, 2);
  EXPECT_FALSE(left->Failed());
  EXPECT_FALSE(right->Failed());
  EXPECT_EQ(left->received, right->sent);
}

TEST_P(EngineTest, ProgramsMayStartInAnotherOrderIfBothDoInTime) {
  TestWorld world;
  world.Connect(GetParam());
  world.AddSwap(1, "psum/data f32[100]", 100);
  auto left_a = world.Start(0, {1, /*program=*/1}, 100, 1);
  auto left_b = world.Start(0, {1, /*program=*/2}, 100, 2);
  auto right_b = world.Start(1, {1, /*program=*/2}, 100, 4);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  auto right_a = world.Start(1, {1, /*program=*/1}, 100, 3);
  for (Running* running : {left_a.get(), left_b.get(), right_a.get(), right_b.get()}) {
    EXPECT_FALSE(running->Failed());
  }
  EXPECT_EQ(left_a->received, right_a->sent);
  EXPECT_EQ(left_b->received, right_b->sent);
}

TEST_P(EngineTest, ScattersRangesOfSeveralBuffersAndZeroesTheRest) {
  TestWorld world;
  world.Connect(GetParam());
  // Rank 0 sends the ends of one buffer, rank 1 receives them into two.
  ASSERT_TRUE(world.engine(0)
                  .AddPlan(1, "ppermute/data f32", 9, 0, {{1, 0, 16, 4}, {1, 0, 0, 8}}, {}, {})
                  .ok());
  ASSERT_TRUE(world.engine(1)
                  .AddPlan(1, "ppermute/data f32", 9, 0, {}, {{0, 1, 0, 4}, {0, 0, 4, 8}},
                           {{0, 0, 4}, {0, 12, 4}})
                  .ok());
  std::vector<float> out = {1, 2, 3, 4, 5}, a(4, -1), b(1, -1);
  const auto view = [](std::vector<float>& v) {
    return BufferView{reinterpret_cast<std::byte*>(v.data()), v.size() * sizeof(float)};
  };
  StartRequest send, receive;
  send.plan = receive.plan = 1;
  send.sends = {view(out)};
  receive.receives = {view(a), view(b)};
  Ticket sent, received;
  ASSERT_TRUE(world.engine(1).Start(receive, &received).ok());
  ASSERT_TRUE(world.engine(0).Start(send, &sent).ok());
  for (auto& [rank, ticket] : {std::pair(0, sent), std::pair(1, received)}) {
    auto exchange = world.engine(rank).Take(ticket.id);
    ASSERT_NE(exchange, nullptr);
    std::promise<bool> promise;
    bool failed = false;
    if (exchange->Await([&](bool f) { promise.set_value(f); }, &failed)) promise.set_value(failed);
    EXPECT_FALSE(promise.get_future().get());
  }
  EXPECT_EQ(a, (std::vector<float>{0, 1, 2, 0}));
  EXPECT_EQ(b, (std::vector<float>{5}));
}

TEST_P(EngineTest, CloseIsOrderlyAndBothMayClose) {
  TestWorld world;
  world.Connect(GetParam());
  world.AddSwap(1, "psum/data f32[10]", 10);
  auto left = world.Start(0, {1}, 10);
  auto right = world.Start(1, {1}, 10);
  EXPECT_FALSE(left->Failed());
  EXPECT_FALSE(right->Failed());
  EXPECT_TRUE(world.engine(0).Close(std::chrono::seconds(5)).ok());
  EXPECT_TRUE(world.engine(0).Close(std::chrono::seconds(5)).ok()) << "closing is idempotent";
  // A goodbye while nothing is under way is no failure.
  EXPECT_FALSE(world.engine(1).WaitFailure(std::chrono::milliseconds(50)).has_value());
  EXPECT_TRUE(world.engine(1).Close(std::chrono::seconds(5)).ok());
}

TEST_P(EngineTest, TheLastMessageSurvivesTheClosingOfItsSender) {
  for (int repeat = 0; repeat < 5; ++repeat) {
    TestWorld world;
    world.Connect(GetParam());
    const std::vector<PeerRange> range = {{1, 0, 0, 12000}};
    ASSERT_TRUE(world.engine(0).AddPlan(1, "send", 3, 0, range, {}, {}).ok());
    ASSERT_TRUE(world.engine(1).AddPlan(1, "send", 3, 0, {}, {{0, 0, 0, 12000}}, {}).ok());
    auto left = world.Start(0, {1}, 3000, 42);
    EXPECT_FALSE(left->Failed());
    world.Destroy(0);
    auto right = world.Start(1, {1}, 3000);
    EXPECT_FALSE(right->Failed());
    EXPECT_EQ(right->received, left->sent);
  }
}

INSTANTIATE_TEST_SUITE_P(Wires, EngineTest,
                         ::testing::Values(Wire::kTcp, Wire::kShm, Wire::kLoopback),
                         [](const auto& info) {
                           return info.param == Wire::kTcp   ? "tcp"
                                  : info.param == Wire::kShm ? "shm"
                                                             : "loopback";
                         });

TEST(EnginePlans, AreIdempotentAndUnique) {
  TestWorld world;
  world.AddSwap(1, "psum/data f32[10]", 10);
  world.AddSwap(1, "psum/data f32[10]", 10);
  const Status other = world.engine(0).AddPlan(1, "pmax/data f32[10]", 1, 0, {}, {}, {});
  ASSERT_FALSE(other.ok());
  EXPECT_NE(other.message().find("pmax"), std::string::npos);
  const Status nowhere = world.engine(0).AddPlan(2, "psum", 1, /*device_ordinal=*/7, {}, {}, {});
  ASSERT_FALSE(nowhere.ok());
  EXPECT_NE(nowhere.message().find("device ordinal 7"), std::string::npos);
}

TEST(EngineStart, RefusesWhatCannotWork) {
  TestWorld world;
  world.Connect(Wire::kLoopback);
  world.AddSwap(1, "psum/data f32[10]", 10);
  StartRequest request;
  Ticket ticket;
  request.plan = 99;
  EXPECT_NE(world.engine(0).Start(request, &ticket).message().find("no plan 99"),
            std::string::npos);
  request.plan = 1;
  std::vector<float> small(3);
  request.sends = request.receives = {{reinterpret_cast<std::byte*>(small.data()), 12}};
  EXPECT_NE(world.engine(0).Start(request, &ticket).message().find("outside"), std::string::npos);
  ASSERT_TRUE(world.engine(0).Close(std::chrono::seconds(5)).ok());
  EXPECT_NE(world.engine(0).Start(request, &ticket).message().find("shut down"), std::string::npos);
}

TEST(EngineClose, LeavesNothingPendingThatStartsMeanwhile) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    Engine engine(TestWorld::Quick());
    ASSERT_TRUE(engine.SetLocalDevice(0, 0).ok());
    std::vector<float> memory(4);
    const BufferView view{reinterpret_cast<std::byte*>(memory.data()), 16};
    // A peer for each start: receives make a channel, sends lack one.
    constexpr uint64_t kPlans = 2000;
    for (uint32_t plan = 1; plan <= kPlans; ++plan) {
      const std::vector<PeerRange> range = {{plan, 0, 0, 16}};
      const std::vector<PeerRange> none;
      const bool sends = plan % 2 == 0;
      ASSERT_TRUE(
          engine.AddPlan(plan, "plan", 1, 0, sends ? range : none, sends ? none : range, {}).ok());
    }
    std::atomic<uint64_t> started{0};
    std::vector<std::shared_ptr<Exchange>> exchanges;
    std::thread starter([&] {
      for (uint64_t plan = 1; plan <= kPlans; ++plan) {
        StartRequest request;
        request.plan = plan;
        request.sends = request.receives = {view};
        Ticket ticket;
        if (!engine.Start(request, &ticket).ok()) return;
        if (ticket.id != 0) exchanges.push_back(engine.Take(ticket.id));
        started.fetch_add(1);
      }
    });
    while (started.load() < static_cast<uint64_t>(repeat) * 5) std::this_thread::yield();
    EXPECT_TRUE(engine.Close(std::chrono::seconds(5)).ok());
    starter.join();
    EXPECT_EQ(engine.failure().kind(), ErrorKind::kAborted);
    EXPECT_EQ(engine.Stats().in_flight, 0);
    for (const std::shared_ptr<Exchange>& exchange : exchanges) {
      bool failed = false;
      EXPECT_TRUE(exchange->Await([](bool) {}, &failed));
      EXPECT_TRUE(failed);
    }
  }
}

TEST(EngineTake, HandsOutAnExchangeOnce) {
  TestWorld world;
  world.Connect(Wire::kLoopback);
  world.AddSwap(1, "psum/data f32[1]", 1);
  auto running = world.Start(0, {1}, 1);
  EXPECT_EQ(world.engine(0).Take(running->exchange->id()), nullptr);
  EXPECT_EQ(world.engine(0).Take(0), nullptr);
  world.engine(0).Abort(Status(ErrorKind::kAborted, "end of test"));
  EXPECT_TRUE(running->Failed());
}

}  // namespace
}  // namespace hetccl
