// How a channel between two real ports ends, in order or given up. Skipped where there are no
// ports; see tests/rdma.
#include <gtest/gtest.h>
#include <poll.h>

#include <cstddef>
#include <thread>
#include <vector>

#include "xla_ffi/transport/rdma/policy.h"
#include "xla_ffi/transport/rdma/test_channel.h"

namespace hetccl::transport::rdma {
namespace {

class End : public Channel {
 protected:
  // Steps the receiver until it has the message that the sender has begun.
  void Receive(std::vector<std::byte>* received) {
    const TimePoint deadline = Clock::now() + kPatience;
    const WireHeader* header = nullptr;
    Progress progress;
    while (header == nullptr && Clock::now() < deadline) {
      ASSERT_TRUE(receiver_->Peek(&header).ok());
    }
    ASSERT_NE(header, nullptr);
    received->resize(header->payload_bytes);
    receiver_->Accept({{received->data(), received->size()}});
    while (!progress.done && Clock::now() < deadline) {
      ASSERT_TRUE(receiver_->Step(&progress).ok());
      // It begins to write when it is told where to, and then sees no end of that before Receive's.
      if (!sender_->peer_has_begun()) {
        Progress unused;
        ASSERT_TRUE(sender_->Step(&unused).ok());
      }
      std::this_thread::yield();
    }
    ASSERT_TRUE(progress.done);
  }
};

TEST_F(End, AReceiverMayLeaveBeforeTheSenderSeesThatItIsDone) {
  MakeBoth();
  const std::vector<std::byte> bytes(kDirectFrom, std::byte{4});
  std::vector<std::byte> received;
  Begin(bytes);
  Progress progress;
  ASSERT_TRUE(sender_->Step(&progress).ok());
  Receive(&received);
  receiver_->SayGoodbye();
  pollfd goodbye = {sender_->poll_fds()[0], POLLIN, 0};
  ASSERT_EQ(::poll(&goodbye, 1, 1000), 1);
  sender_->OnReady();
  EXPECT_EQ(sender_->peer(), PeerState::kAlive) << "that its writes have ended is still to be seen";
  const TimePoint deadline = Clock::now() + kPatience;
  while (!progress.done && Clock::now() < deadline) {
    ASSERT_TRUE(sender_->Step(&progress).ok());
  }
  EXPECT_TRUE(progress.done);
  EXPECT_EQ(sender_->peer(), PeerState::kGoodbye);
  EXPECT_TRUE(received == bytes);
}

TEST_F(End, WritesThatFailBehindAGoodbyeAreNotWaitedFor) {
  std::vector<std::byte> target(1 << 20);
  const std::vector<std::byte> bytes(1 << 20, std::byte{1});
  BeginTowardsGrants(bytes);
  ASSERT_TRUE(peer_->Offer({reinterpret_cast<uint64_t>(target.data()), 0x123456, 1 << 20}).ok());
  const TimePoint deadline = Clock::now() + kPatience;
  Progress progress;
  while (!sender_->peer_has_begun() && Clock::now() < deadline) {
    ASSERT_TRUE(sender_->Step(&progress).ok());  // the last one writes, to a wrong key
  }
  peer_->line().link().SayGoodbye();
  sender_->OnReady();
  while (sender_->peer() == PeerState::kAlive && Clock::now() < deadline) {
    ASSERT_TRUE(sender_->Step(&progress).ok());
  }
  EXPECT_EQ(sender_->peer(), PeerState::kGoodbye);
  EXPECT_FALSE(progress.done);
}

TEST_F(End, AGoodbyeShowsBesideAMessage) {
  MakeBoth();
  ASSERT_FALSE(receiver_->ArmDoorbell());
  const std::vector<std::byte> bytes(8);
  Begin(bytes);
  Progress progress;
  while (!progress.done) ASSERT_TRUE(sender_->Step(&progress).ok());
  sender_->SayGoodbye();
  std::vector<pollfd> polled;
  for (int fd : receiver_->poll_fds()) polled.push_back({fd, POLLIN, 0});
  const TimePoint deadline = Clock::now() + kPatience;
  for (pollfd& each : polled) {
    while (::poll(&each, 1, 10) == 0 && Clock::now() < deadline) (void)sender_->Drained();
    ASSERT_NE(each.revents & POLLIN, 0);
  }
  receiver_->OnReady();  // once for both
  EXPECT_EQ(receiver_->peer(), PeerState::kGoodbye);
  EXPECT_EQ(::poll(&polled[1], 1, 0), 0) << "the completion's event has been read";
  const WireHeader* header = nullptr;
  ASSERT_TRUE(receiver_->Peek(&header).ok());
  EXPECT_NE(header, nullptr);
  EXPECT_EQ(receiver_->peer(), PeerState::kAlive) << "what has arrived is still to be had";
}

TEST_F(End, GivingUpLeavesNothingToWaitFor) {
  MakeBoth();
  const std::vector<std::byte> bytes(1 << 20);
  Begin(bytes);
  Progress progress;
  ASSERT_TRUE(sender_->Step(&progress).ok());  // the header is on its way
  const TimePoint deadline = Clock::now() + kPatience;
  while (!sender_->Quiet() && Clock::now() < deadline) std::this_thread::yield();
  EXPECT_TRUE(sender_->Drained());
}

TEST_F(End, TheGoodbyeDoesNotOvertakeWhatTheNicStillSends) {
  std::vector<std::byte> slots(4 * 4096);
  // One receive, which the first message takes: the peer's NIC has the second one sent again.
  MakeWithHandMade(1, [&](HandMade* peer) { peer->UseMemory(slots.data(), slots.size()); });
  const TimePoint deadline = Clock::now() + kPatience;
  const std::vector<std::byte> bytes(8);
  std::vector<Completion> arrived;
  Progress progress;
  for (int i = 0; i < 2; ++i) {
    Begin(bytes);
    do {
      ASSERT_TRUE(sender_->Step(&progress).ok());
    } while (!progress.done);
    // Not the line's Poll, which would post the receive anew.
    while (arrived.empty() && Clock::now() < deadline) {
      ASSERT_TRUE(peer_->line().queue_pair().Poll(&arrived).ok());
    }
  }
  sender_->SayGoodbye();
  ASSERT_FALSE(sender_->Drained());
  Link& link = peer_->line().link();
  link.Read();
  EXPECT_EQ(link.peer(), PeerState::kAlive);
  ASSERT_TRUE(peer_->line().queue_pair().PostReceives(1).ok());
  while (!sender_->Drained() && Clock::now() < deadline) std::this_thread::yield();
  ASSERT_TRUE(peer_->line().queue_pair().Poll(&arrived).ok());
  EXPECT_EQ(arrived.size(), 2u);
  link.Read();
  EXPECT_EQ(link.peer(), PeerState::kGoodbye);
}

TEST_F(End, AGoodbyeWhoseTurnNeverCameIsSaidAtTheEnd) {
  MakeBoth();
  sender_->SayGoodbye();
  sender_.reset();
  receiver_->OnReady();
  EXPECT_EQ(receiver_->peer(), PeerState::kGoodbye);
}

}  // namespace
}  // namespace hetccl::transport::rdma
