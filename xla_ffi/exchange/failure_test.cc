// Exchanges that fail: every way ends in one error, on every exchange, within a bound.
#include "xla_ffi/exchange/failure.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <thread>

#include "xla_ffi/exchange/test_world.h"

// One test abandons a proxy thread that is stuck, with the channels it uses: freeing them would be
// the bug.
extern "C" const char* __lsan_default_suppressions() {
  return "leak:hetccl::ChannelTable::AddOutgoing\nleak:hetccl::ChannelTable\nleak:hetccl::Proxy\n";
}

namespace hetccl {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using transport::testing::Faults;
using transport::testing::MakeFaulty;

// The error that this engine noticed first.
Status Candidate(Engine& engine) {
  const auto candidate = engine.WaitFailure(seconds(10));
  EXPECT_TRUE(candidate.has_value()) << "no failure was noticed";
  return candidate.value_or(Status(ErrorKind::kInternal, "none"));
}

void ExpectMentions(const Status& status, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(status.message().find(word), std::string::npos)
        << "\"" << word << "\" is missing in: " << status.message();
  }
}

class FailureTest : public ::testing::TestWithParam<Wire> {};

TEST_P(FailureTest, OtherOperationsMismatchAtOnceAndShowBothSides) {
  TestWorld world;
  world.Connect(GetParam());
  world.AddSwap(1, "psum/data f32[4]", 4);
  world.AddSwap(2, "pmax/data f32[8]", 8);
  const TimePoint before = Clock::now();
  auto left = world.Start(0, {1}, 4);
  auto right = world.Start(1, {2}, 8);
  for (int rank : {0, 1}) {
    const Status error = Candidate(world.engine(rank));
    EXPECT_EQ(error.kind(), ErrorKind::kMismatch);
    ExpectMentions(error, {"psum/data f32[4]", "pmax/data f32[8]", "left/0 rank 0",
                           "right/0 rank 1", "16 bytes", "32 bytes", "same order"});
  }
  EXPECT_LT(Clock::now() - before, seconds(5));
  EXPECT_TRUE(left->Failed());
  EXPECT_TRUE(right->Failed());
}

TEST_P(FailureTest, OtherOrderMismatchesAtOnce) {
  TestWorld world;
  world.Connect(GetParam());
  world.AddSwap(1, "psum/data f32[4]", 4);
  auto left = world.Start(0, {1, 0xAB, /*index=*/0}, 4);
  auto right = world.Start(1, {1, 0xAB, /*index=*/3}, 4);
  ExpectMentions(Candidate(world.engine(0)), {"exchange #0", "exchange #3", "program ab"});
  EXPECT_TRUE(left->Failed());
  EXPECT_TRUE(right->Failed());
}

TEST_P(FailureTest, SameSizeButOtherFingerprintMismatches) {
  TestWorld world;
  world.Connect(GetParam());
  world.AddSwap(1, "psum/data f32[4]", 4, /*only_rank=*/0, /*wire_id=*/5);
  world.AddSwap(1, "psum/data i32[4]", 4, /*only_rank=*/1, /*wire_id=*/6);
  auto left = world.Start(0, {1}, 4);
  auto right = world.Start(1, {1}, 4);
  ExpectMentions(Candidate(world.engine(1)), {"f32[4]", "i32[4]"});
  EXPECT_TRUE(left->Failed());
  EXPECT_TRUE(right->Failed());
}

TEST_P(FailureTest, AnotherProgramMismatchesAfterTheGraceTime) {
  TestWorld world;
  world.Connect(GetParam());
  world.engine(0).directory().SetProgram(1, "train_step");
  world.AddSwap(1, "psum/data f32[4]", 4);
  const TimePoint before = Clock::now();
  auto left = world.Start(0, {1, /*program=*/1}, 4);
  auto right = world.Start(1, {1, /*program=*/2}, 4);
  const Status error = Candidate(world.engine(0));
  EXPECT_GE(Clock::now() - before, milliseconds(200));
  EXPECT_EQ(error.kind(), ErrorKind::kMismatch);
  ExpectMentions(error, {"program 1 (train_step)", "program 2", "has waited 0.", "one thread"});
  EXPECT_TRUE(left->Failed());
  EXPECT_TRUE(right->Failed());
}

TEST_P(FailureTest, AnotherWorldMismatches) {
  EngineOptions other = TestWorld::Quick();
  other.epoch = 78;
  TestWorld world(TestWorld::Quick(), other);
  world.Connect(GetParam());
  world.AddSwap(1, "psum/data f32[4]", 4);
  auto left = world.Start(0, {1}, 4);
  auto right = world.Start(1, {1}, 4);
  ExpectMentions(Candidate(world.engine(0)), {"another world"});
  EXPECT_TRUE(left->Failed());
  EXPECT_TRUE(right->Failed());
}

TEST_P(FailureTest, ALateDepartureFailsWhoNeedsThePeer) {
  TestWorld world;
  world.Connect(GetParam());
  world.AddSwap(1, "psum/data f32[4]", 4);
  ASSERT_TRUE(world.engine(1).Close(seconds(5)).ok());
  auto left = world.Start(0, {1}, 4);
  const Status error = Candidate(world.engine(0));
  EXPECT_EQ(error.kind(), ErrorKind::kPeerLost);
  EXPECT_EQ(error.lost_rank(), 1);
  ExpectMentions(error, {"right/0 rank 1", "left the world", "psum/data f32[4]"});
  EXPECT_TRUE(left->Failed());
}

TEST_P(FailureTest, ClosingWithExchangesInFlightFailsThem) {
  TestWorld world;
  world.Connect(GetParam());
  world.AddSwap(1, "psum/data f32[100000]", 100000);
  std::vector<std::unique_ptr<Running>> running;
  for (uint32_t i = 0; i < 4; ++i) running.push_back(world.Start(0, {1, 1, i}, 100000));
  EXPECT_EQ(world.engine(0).Pending().size(), 8u);
  EXPECT_TRUE(world.engine(0).Close(seconds(5)).ok());
  for (auto& exchange : running) EXPECT_TRUE(exchange->Failed());
  EXPECT_EQ(world.engine(0).failure().kind(), ErrorKind::kAborted);
  EXPECT_EQ(world.engine(0).Stats().in_flight, 0);
  EXPECT_EQ(world.engine(0).Pending().size(), 0u);
}

TEST_P(FailureTest, AbortFailsPendingAndLaterExchanges) {
  EngineOptions options = TestWorld::Quick();
  options.timeout_s = 0.3;
  TestWorld world(options, options);
  world.Connect(GetParam());
  world.AddSwap(1, "psum/data f32[100000]", 100000);
  auto pending = world.Start(0, {1}, 100000);
  world.engine(0).Abort(Status(ErrorKind::kTimeout, "agreed elsewhere"));
  world.engine(0).Abort(Status(ErrorKind::kPeerLost, "too late"));
  EXPECT_TRUE(pending->Failed());
  EXPECT_EQ(world.engine(0).failure().message(), "agreed elsewhere");
  // Programs run to their end, but not for ever.
  auto later = world.Start(0, {1, 0xAB, 1}, 100000);
  EXPECT_EQ(later->exchange, nullptr);
  EXPECT_TRUE(later->Failed());
  std::this_thread::sleep_for(milliseconds(400));
  StartRequest request;
  request.plan = 1;
  request.program = 0xAB;
  request.sends = {{reinterpret_cast<std::byte*>(later->sent.data()), 400000}};
  request.receives = {{reinterpret_cast<std::byte*>(later->received.data()), 400000}};
  Ticket ticket;
  EXPECT_EQ(world.engine(0).Start(request, &ticket).message(), "agreed elsewhere");
}

// Ranges of `count` floats in one direction; the other rank has no part in it.
void AddOneWay(TestWorld* world, uint64_t plan, const std::string& text, uint32_t from,
               uint64_t count) {
  const std::vector<PeerRange> out = {{1 - from, 0, 0, count * sizeof(float)}};
  const std::vector<PeerRange> in = {{from, 0, 0, count * sizeof(float)}};
  ASSERT_TRUE(world->engine(from).AddPlan(plan, text, plan, 0, out, {}, {}).ok());
  ASSERT_TRUE(world->engine(1 - from).AddPlan(plan, text, plan, 0, {}, in, {}).ok());
}

TEST_P(FailureTest, AnEarlyProgramIsNoMismatchWhileOthersMove) {
  TestWorld world;
  world.Connect(GetParam());
  AddOneWay(&world, 1, "send/early f32[4]", 0, 4);
  AddOneWay(&world, 2, "send/other f32[4]", 0, 4);
  AddOneWay(&world, 3, "send/back f32[4]", 1, 4);
  auto early = world.Start(0, {1, /*program=*/1}, 4, 5);
  auto other_received = world.Start(1, {2, /*program=*/2}, 4);
  const TimePoint begin = Clock::now();
  while (Clock::now() - begin < milliseconds(800)) {  // four times the grace time
    auto received = world.Start(0, {3, /*program=*/3}, 4);
    auto sent = world.Start(1, {3, /*program=*/3}, 4);
    EXPECT_FALSE(received->Failed());
    EXPECT_FALSE(sent->Failed());
    std::this_thread::sleep_for(milliseconds(10));
  }
  auto early_received = world.Start(1, {1, /*program=*/1}, 4);
  auto other = world.Start(0, {2, /*program=*/2}, 4, 6);
  for (Running* running : {early.get(), early_received.get(), other.get(), other_received.get()}) {
    EXPECT_FALSE(running->Failed());
  }
  EXPECT_EQ(early_received->received, early->sent);
  EXPECT_EQ(other_received->received, other->sent);
}

INSTANTIATE_TEST_SUITE_P(Wires, FailureTest,
                         ::testing::Values(Wire::kTcp, Wire::kShm, Wire::kLoopback),
                         [](const auto& info) {
                           return info.param == Wire::kTcp   ? "tcp"
                                  : info.param == Wire::kShm ? "shm"
                                                             : "loopback";
                         });

TEST(Timeout, NamesThePeerThatNeverArrives) {
  EngineOptions options = TestWorld::Quick();
  options.arrival_timeout_s = 0.3;
  TestWorld world(options);
  world.Connect(Wire::kTcp);
  world.AddSwap(1, "psum/data f32[4]", 4);
  const TimePoint before = Clock::now();
  auto left = world.Start(0, {1}, 4);
  const Status error = Candidate(world.engine(0));
  EXPECT_GE(Clock::now() - before, milliseconds(300));
  EXPECT_LT(Clock::now() - before, seconds(3));
  EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
  ExpectMentions(error, {"psum/data f32[4]", "exchange #0", "0 of 16 bytes", "right/0 rank 1",
                         "HETCCL_ARRIVAL_TIMEOUT"});
  EXPECT_TRUE(left->Failed());
}

TEST(Timeout, OfAReceiveComesAlsoIfOthersOvertakeIt) {
  EngineOptions options = TestWorld::Quick();
  options.arrival_timeout_s = 0.5;
  TestWorld world(TestWorld::Quick(), options);
  world.Connect(Wire::kTcp);
  AddOneWay(&world, 1, "send/never f32[4]", 0, 4);
  AddOneWay(&world, 2, "send/often f32[4]", 0, 4);
  auto never = world.Start(1, {1, /*program=*/1}, 4);
  const TimePoint begin = Clock::now();
  while (world.engine(1).failure().ok() && Clock::now() - begin < seconds(5)) {
    auto received = world.Start(1, {2, /*program=*/2}, 4);
    auto sent = world.Start(0, {2, /*program=*/2}, 4);
    sent->Failed();
    received->Failed();
  }
  EXPECT_GE(Clock::now() - begin, milliseconds(500));
  EXPECT_LT(Clock::now() - begin, seconds(4));
  const Status error = Candidate(world.engine(1));
  EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
  ExpectMentions(error, {"send/never f32[4]", "0 of 16 bytes", "HETCCL_ARRIVAL_TIMEOUT"});
  EXPECT_TRUE(never->Failed());
}

TEST(Timeout, NamesThePeerThatNeverConnects) {
  EngineOptions options = TestWorld::Quick();
  options.arrival_timeout_s = 0.2;
  TestWorld world(options);
  world.AddSwap(1, "psum/data f32[4]", 4);
  auto wire = MakeWire(Wire::kLoopback);
  world.AddOutgoing(0, std::move(wire.sender));
  auto left = world.Start(0, {1}, 4);
  ExpectMentions(Candidate(world.engine(0)), {"0 of 16 bytes", "has not connected"});
  EXPECT_TRUE(left->Failed());
}

TEST(Timeout, StuckTransferNamesTheBytesThatMoved) {
  EngineOptions options = TestWorld::Quick();
  options.timeout_s = 0.3;
  TestWorld world(options, options);
  Faults stall;
  stall.stall_after = 192 + 100000;
  world.Connect(0, MakeFaulty(stall));
  world.Connect(1, transport::testing::MakeLoopback());
  world.AddSwap(1, "psum/data f32[100000]", 100000);
  auto left = world.Start(0, {1}, 100000);
  auto right = world.Start(1, {1}, 100000);
  const Status error = Candidate(world.engine(1));
  EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
  ExpectMentions(error, {"received 100000 of 400000 bytes", "left/0 rank 0", "HETCCL_TIMEOUT"});
  ExpectMentions(Candidate(world.engine(0)), {"sent 100000 of 400000 bytes"});
  EXPECT_TRUE(left->Failed());
  EXPECT_TRUE(right->Failed());
}

TEST(Timeout, ASlowTransferThatMovesIsNoTimeout) {
  // Takes longer than the time-out as a whole; a step is far from it, also where other work holds
  // the threads up.
  EngineOptions options = TestWorld::Quick();
  options.timeout_s = 1.0;
  options.arrival_timeout_s = 1.0;
  TestWorld world(options, options);
  Faults slow;
  slow.max_step_bytes = 1000;
  slow.delay = milliseconds(15);
  world.Connect(0, MakeFaulty(slow));
  world.Connect(1, transport::testing::MakeLoopback());
  world.AddSwap(1, "psum/data f32[25000]", 25000);
  auto left = world.Start(0, {1}, 25000, 3);
  auto right = world.Start(1, {1}, 25000, 4);
  EXPECT_FALSE(right->Failed());
  EXPECT_FALSE(left->Failed());
  EXPECT_EQ(right->received, left->sent);
}

TEST(PeerLoss, AResetIsNoticedOnBothSides) {
  TestWorld world;
  Faults reset;
  reset.reset_after = 50000;
  world.Connect(0, MakeFaulty(reset));
  world.Connect(1, transport::testing::MakeLoopback());
  world.AddSwap(1, "psum/data f32[100000]", 100000);
  // The one that resets starts last, so that both have the operation under way.
  auto right = world.Start(1, {1}, 100000);
  auto left = world.Start(0, {1}, 100000);
  for (int rank : {0, 1}) {
    const Status error = Candidate(world.engine(rank));
    EXPECT_EQ(error.kind(), ErrorKind::kPeerLost);
    EXPECT_EQ(error.lost_rank(), 1 - rank);
    ExpectMentions(error,
                   {"psum/data f32[100000]", rank == 0 ? "right/0 rank 1" : "left/0 rank 0"});
  }
  EXPECT_TRUE(left->Failed());
  EXPECT_TRUE(right->Failed());
}

TEST(PeerLoss, IsNoticedWithinASecondWhileIdle) {
  for (Wire wire : {Wire::kTcp, Wire::kShm, Wire::kLoopback}) {
    TestWorld world;
    auto out = MakeWire(wire);
    auto in = MakeWire(wire);
    world.AddOutgoing(0, std::move(out.sender));
    world.AddIncoming(1, std::move(in.receiver));
    std::this_thread::sleep_for(milliseconds(20));
    // Only one of the two channels ends: each must be noticed by itself.
    if (wire == Wire::kTcp) {
      out.receiver.reset();
    } else {
      in.sender.reset();
    }
    const auto candidate = world.engine(0).WaitFailure(seconds(1));
    ASSERT_TRUE(candidate.has_value());
    EXPECT_EQ(candidate->kind(), ErrorKind::kPeerLost);
    EXPECT_EQ(candidate->lost_rank(), 1);
    ExpectMentions(*candidate, {"right/0 rank 1", "no operation was under way"});
  }
}

TEST(PeerLoss, AnIdleChannelNamesTheOperationOfAnotherOne) {
  TestWorld world;
  auto out = MakeWire(Wire::kTcp);
  auto in = MakeWire(Wire::kTcp);
  world.AddOutgoing(0, std::move(out.sender));
  world.AddIncoming(1, std::move(in.receiver));
  ASSERT_TRUE(world.engine(0).AddPlan(1, "recv/data f32[4]", 1, 0, {}, {{1, 0, 0, 16}}, {}).ok());
  auto left = world.Start(0, {1}, 4);
  out.receiver.reset();  // the other direction only
  ExpectMentions(Candidate(world.engine(0)), {"during recv/data f32[4]", "right/0 rank 1"});
  EXPECT_TRUE(left->Failed());
}

TEST(Corruption, OfAHeaderIsAnError) {
  TestWorld world;
  Faults corrupt;
  corrupt.corrupt_header_of = 1;
  world.Connect(0, MakeFaulty(corrupt));
  world.Connect(1, transport::testing::MakeLoopback());
  world.AddSwap(1, "psum/data f32[10]", 10);
  auto left = world.Start(0, {1, 1, 0}, 10, 5);
  auto right = world.Start(1, {1, 1, 0}, 10, 6);
  EXPECT_FALSE(right->Failed());
  EXPECT_EQ(right->received, left->sent);
  left = world.Start(0, {1, 1, 1}, 10);
  right = world.Start(1, {1, 1, 1}, 10);
  const Status error = Candidate(world.engine(1));
  EXPECT_EQ(error.kind(), ErrorKind::kCorrupt);
  ExpectMentions(error, {"left/0 rank 0", "magic"});
  EXPECT_TRUE(right->Failed());
  EXPECT_FALSE(left->Failed()) << "the other side has no failure of its own";
}

TEST(MissingChannel, IsTheWorldsFailureAndNotOneProgramsError) {
  TestWorld world;
  world.AddSwap(1, "psum/data f32[10]", 10);
  auto left = world.Start(0, {1}, 10);
  const Status error = Candidate(world.engine(0));
  EXPECT_EQ(error.kind(), ErrorKind::kInternal);
  ExpectMentions(error, {"no channel", "left/0 rank 0", "right/0 rank 1"});
  EXPECT_TRUE(left->Failed());
}

// A sender whose step does not return until it is told to, and whose peer is lost then.
class StuckSender final : public transport::Sender {
 public:
  struct Control {
    std::promise<void> entered;
    std::promise<void> go_on;
    std::promise<void> gone;  // the channel and thus the thread's work has ended
  };
  explicit StuckSender(std::shared_ptr<Control> control) : control_(std::move(control)) {}

  transport::PeerState peer() const override {
    if (!lost_) return transport::PeerState::kAlive;
    // The step after Engine::~Engine: asks for the operation under way, once.
    control_->gone.set_value();
    return transport::PeerState::kLost;
  }
  std::string lost_reason() const override { return "reset"; }
  std::vector<int> poll_fds() const override { return {}; }
  void OnReady() override {}
  bool ArmDoorbell() override { return false; }
  void SayGoodbye() override {}
  bool Drained() override { return true; }
  void Begin(const transport::WireHeader&, transport::ConstPayload) override {}
  bool peer_has_begun() const override { return false; }
  Status Step(transport::Progress* progress) override {
    *progress = {};
    control_->entered.set_value();
    control_->go_on.get_future().wait();
    lost_ = true;
    return Status();
  }

 private:
  const std::shared_ptr<Control> control_;
  bool lost_ = false;  // proxy thread only
};

TEST(Closing, AThreadThatIsStuckUsesNothingThatIsFreed) {
  auto control = std::make_shared<StuckSender::Control>();
  {
    Engine engine(TestWorld::Quick());
    ASSERT_TRUE(engine.channels().AddOutgoing(0, 1, std::make_unique<StuckSender>(control)).ok());
    control->entered.get_future().wait();
    const Status status = engine.Close(milliseconds(50));
    ASSERT_FALSE(status.ok());
    ExpectMentions(status, {"1 proxy"});
  }
  control->go_on.set_value();
  EXPECT_EQ(control->gone.get_future().wait_for(seconds(10)), std::future_status::ready);
  std::this_thread::sleep_for(milliseconds(50));  // what a sanitizer looks at comes right after
}

// A sender whose messages are done at once, and of which one then turns out not to have arrived.
class HastySender final : public transport::Sender {
 public:
  transport::PeerState peer() const override { return transport::PeerState::kAlive; }
  std::string lost_reason() const override { return ""; }
  std::vector<int> poll_fds() const override { return {}; }
  void OnReady() override {}
  bool ArmDoorbell() override { return false; }
  void SayGoodbye() override {}
  bool Drained() override { return true; }
  void Begin(const transport::WireHeader&, transport::ConstPayload) override { begun_ = true; }
  bool peer_has_begun() const override { return false; }
  bool unconfirmed() const override { return done_.has_value(); }
  Status Step(transport::Progress* progress) override {
    *progress = {};
    if (done_) {
      return Clock::now() - *done_ < milliseconds(30)
                 ? Status()
                 : Status(ErrorKind::kInternal, "nobody has acknowledged it");
    }
    progress->done = begun_;
    if (begun_) done_ = Clock::now();
    return Status();
  }

 private:
  bool begun_ = false;
  std::optional<TimePoint> done_;
};

TEST(Failing, AMessageThatIsDoneAndDoesNotArriveIsNoticedWithoutAnotherOne) {
  TestWorld world;
  world.AddOutgoing(0, std::make_unique<HastySender>());
  auto in = MakeWire(Wire::kTcp);
  world.AddIncoming(1, std::move(in.receiver));
  world.AddSwap(1, "psum/data f32[4]", 4, 0);
  auto left = world.Start(0, {1}, 4);
  const auto error = world.engine(0).WaitFailure(seconds(5));
  ASSERT_TRUE(error.has_value()) << "only the receiver's time-out would have told";
  ExpectMentions(*error, {"sending to right/0 rank 1", "during psum/data f32[4]", "acknowledged"});
  EXPECT_TRUE(left->Failed());
}

TEST(FailureState, FirstCandidateAndFirstAdoptionWin) {
  FailureState state(milliseconds(50));
  EXPECT_FALSE(state.WaitCandidate(milliseconds(1)).has_value());
  state.Propose(Status(ErrorKind::kTimeout, "first"));
  state.Propose(Status(ErrorKind::kPeerLost, "second"));
  EXPECT_EQ(state.WaitCandidate(milliseconds(1))->message(), "first");
  EXPECT_FALSE(state.OverdueCandidate(Clock::now()).has_value());
  EXPECT_TRUE(state.OverdueCandidate(Clock::now() + milliseconds(60)).has_value());
  EXPECT_TRUE(state.Adopt(Status(ErrorKind::kMismatch, "agreed")));
  EXPECT_FALSE(state.Adopt(Status(ErrorKind::kAborted, "late")));
  EXPECT_EQ(state.adopted().message(), "agreed");
  EXPECT_FALSE(state.OverdueCandidate(Clock::now() + seconds(1)).has_value());
}

TEST(FailureState, CloseEndsTheWaiting) {
  FailureState state(seconds(1));
  std::thread waiter([&] { EXPECT_FALSE(state.WaitCandidate(seconds(20)).has_value()); });
  state.Close();
  waiter.join();
}

}  // namespace
}  // namespace hetccl
