// What goes wrong between two real ports: wrong keys, lost links, peers that break the protocol.
// Skipped where there are no ports; see tests/rdma.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "xla_ffi/transport/rdma/handshake.h"
#include "xla_ffi/transport/rdma/test_channel.h"

namespace hetccl::transport::rdma {
namespace {

using Fault = Channel;

TEST_F(Fault, AWrongKeyShowsInTheProbeOnBothSides) {
  std::vector<std::byte> memory(4 * 4096);
  peer_ = std::make_unique<HandMade>(there_.release(), ports_[1]);
  Status ours;
  std::thread other([&] { ours = MakeOurSender(); });
  ASSERT_TRUE(peer_->Open(8).ok());
  peer_->UseMemory(memory.data(), memory.size());
  peer_->record().rkey ^= 0x5500;
  const Status theirs = peer_->Meet();
  other.join();
  ASSERT_FALSE(ours.ok());
  ASSERT_FALSE(theirs.ok());
  EXPECT_NE(ours.message().find("remote access error"), std::string::npos) << ours.message();
  EXPECT_NE(ours.message().find(ports_[0].device), std::string::npos) << ours.message();
}

TEST_F(Fault, AWrongKeyOfAGrantBreaksTheChannel) {
  std::vector<std::byte> target(1 << 20);
  const std::vector<std::byte> bytes(1 << 20, std::byte{1});
  BeginTowardsGrants(bytes);
  ASSERT_TRUE(peer_->Offer({reinterpret_cast<uint64_t>(target.data()), 0x123456, 1 << 20}).ok());
  const Status status = SenderFails();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.kind(), ErrorKind::kCorrupt);
  EXPECT_NE(status.message().find("remote access error"), std::string::npos) << status.message();
  EXPECT_EQ(target[0], std::byte{0});
}

TEST_F(Fault, AGrantBeyondTheMessageIsCorrupt) {
  std::vector<std::byte> target(1 << 20);
  const std::vector<std::byte> bytes(1 << 20, std::byte{1});
  BeginTowardsGrants(bytes);
  ASSERT_TRUE(
      peer_->Offer({reinterpret_cast<uint64_t>(target.data()), 0x123456, (1 << 20) + 1}).ok());
  const Status status = SenderFails();
  EXPECT_EQ(status.kind(), ErrorKind::kCorrupt);
  EXPECT_NE(status.message().find("more memory than the message fills"), std::string::npos)
      << status.message();
}

TEST_F(Fault, APeerWithoutReceivesIsTold) {
  std::vector<std::byte> slots(4 * 4096);
  // One for the probe, which is posted anew, and takes the first message.
  MakeWithHandMade(1, [&](HandMade* peer) { peer->UseMemory(slots.data(), slots.size()); });
  Begin(std::vector<std::byte>(8));
  Progress progress;
  while (!progress.done) ASSERT_TRUE(sender_->Step(&progress).ok());
  Begin(std::vector<std::byte>(8));
  const Status status = SenderFails();
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("receiver-not-ready"), std::string::npos) << status.message();
}

TEST_F(Fault, NonsenseImmediatesAreCorrupt) {
  std::vector<std::byte> slots(4 * 4096);
  MakeWithHandMade(8, [&](HandMade* peer) { peer->UseMemory(slots.data(), slots.size()); });
  ASSERT_TRUE(peer_->Tell(Pack(Immediate::kCredit, 3)).ok());
  EXPECT_NE(SenderFails().message().find("freed slots that it did not have"), std::string::npos);
}

TEST_F(Fault, ALostLinkEndsInAnError) {
  const char* down = std::getenv("HETCCL_TEST_LINK_DOWN");
  const char* up = std::getenv("HETCCL_TEST_LINK_UP");
  if (down == nullptr || up == nullptr) GTEST_SKIP() << "no commands to take the link down and up";
  MakeBoth();
  std::vector<std::byte> received;
  ASSERT_TRUE(Move(std::vector<std::byte>(300000, std::byte{5}), &received));
  ASSERT_EQ(std::system(down), 0);
  const TimePoint begin = Clock::now();
  Begin(std::vector<std::byte>(100));
  const Status status = SenderFails();
  const double seconds = ToSeconds(Clock::now() - begin);
  ASSERT_EQ(std::system(up), 0);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.kind(), ErrorKind::kPeerLost) << status.message();
  EXPECT_NE(status.message().find("retry counter exceeded"), std::string::npos);
  EXPECT_LT(seconds, 15);
}

TEST_F(Fault, APortThatIsDownIsNoPort) {
  const char* down = std::getenv("HETCCL_TEST_LINK_DOWN");
  const char* up = std::getenv("HETCCL_TEST_LINK_UP");
  if (down == nullptr || up == nullptr) GTEST_SKIP() << "no commands to take the link down and up";
  ASSERT_EQ(std::system(down), 0);
  Status sent;
  std::thread other([&] { sent = MakeOurSender(); });
  const Status received = MakeOurReceiver();
  other.join();
  ASSERT_EQ(std::system(up), 0);
  ASSERT_FALSE(sent.ok());
  ASSERT_FALSE(received.ok());
  EXPECT_NE((sent.message() + received.message()).find("not active"), std::string::npos);
}

TEST_F(Fault, APeerThatCannotSaysWhy) {
  std::vector<UniqueFd> sockets;
  sockets.push_back(std::move(there_));
  Options wrong = ports_[1];
  wrong.device = "no_such_nic";
  Status theirs;
  std::thread other(
      [&] { theirs = MakeReceiver(std::move(sockets), space_, {}, wrong, &receiver_); });
  const Status ours = MakeOurSender();
  other.join();
  ASSERT_FALSE(theirs.ok());
  EXPECT_NE(theirs.message().find("known ones"), std::string::npos) << theirs.message();
  ASSERT_FALSE(ours.ok());
  EXPECT_NE(ours.message().find("no_such_nic"), std::string::npos) << ours.message();
}

TEST_F(Fault, APeerThatSaysNothingIsNotWaitedForForever) {
  ports_[0].patience = std::chrono::seconds(1);
  const TimePoint begin = Clock::now();
  const Status status = MakeOurSender();
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("did not send its endpoint record within 1 s"), std::string::npos)
      << status.message();
  EXPECT_LT(ToSeconds(Clock::now() - begin), 4);
}

TEST_F(Fault, APeerMayTakeLongToMakeItsMemory) {
  Status sent;
  std::thread other([&] { sent = MakeOurSender(); });
  std::this_thread::sleep_for(kHandshakeBound + std::chrono::seconds(1));
  const Status received = MakeOurReceiver();
  other.join();
  EXPECT_TRUE(sent.ok()) << sent.message();
  EXPECT_TRUE(received.ok()) << received.message();
}

// A peer that keeps to the handshake up to the probe, which ours does not get, and then does this.
class FaultDuringTheProbe : public Channel {
 protected:
  Status WithPeerThat(const std::function<void(int socket)>& ends) {
    std::vector<std::byte> slots(4 * 4096);
    peer_ = std::make_unique<HandMade>(::dup(there_.get()), ports_[1]);
    Status sent;
    std::thread other([&] { sent = MakeOurSender(); });
    EXPECT_TRUE(peer_->Open(8).ok());
    peer_->UseMemory(slots.data(), slots.size());
    EndpointRecord theirs;
    EndpointRecord& record = peer_->record();
    EXPECT_EQ(::send(there_.get(), &record, sizeof(record), 0), ssize_t{sizeof(record)});
    EXPECT_EQ(::recv(there_.get(), &theirs, sizeof(theirs), MSG_WAITALL), ssize_t{sizeof(theirs)});
    EXPECT_TRUE(peer_->line().queue_pair().Connect(record, theirs).ok());
    char ready = 'R';
    EXPECT_EQ(::send(there_.get(), &ready, 1, 0), 1);
    EXPECT_EQ(::recv(there_.get(), &ready, 1, MSG_WAITALL), 1);
    const TimePoint begin = Clock::now();
    ends(there_.get());
    other.join();
    EXPECT_LT(ToSeconds(Clock::now() - begin), 2);
    return sent;
  }
};

TEST_F(FaultDuringTheProbe, ThePeersReasonEndsIt) {
  const Status status = WithPeerThat([](int socket) {
    EXPECT_EQ(::send(socket, "F\x04late", 6, 0), 6);
    ::shutdown(socket, SHUT_WR);
  });
  EXPECT_NE(status.message().find("at the peer: late"), std::string::npos) << status.message();
}

TEST_F(FaultDuringTheProbe, ThePeersEndEndsIt) {
  const Status status = WithPeerThat([](int socket) { ::shutdown(socket, SHUT_RDWR); });
  EXPECT_NE(status.message().find("closed the connection"), std::string::npos) << status.message();
}

TEST_F(Fault, APeerThatEndsBeforeItsRecordShowsAtOnce) {
  const TimePoint begin = Clock::now();
  there_.reset();
  const Status status = MakeOurSender();
  ASSERT_FALSE(status.ok());
  EXPECT_LT(ToSeconds(Clock::now() - begin), 2);
}

TEST_F(Fault, AfterGivingUpTheNicLeavesTheMemoryAlone) {
  MakeBoth();
  const std::vector<std::byte> bytes(32 << 20, std::byte{1});
  std::vector<std::byte> received(bytes.size());
  Begin(bytes);
  Progress out, in;
  const WireHeader* header = nullptr;
  const TimePoint deadline = Clock::now() + kPatience;
  while (header == nullptr && Clock::now() < deadline) {
    ASSERT_TRUE(sender_->Step(&out).ok());
    ASSERT_TRUE(receiver_->Peek(&header).ok());
  }
  receiver_->Accept({{received.data(), received.size()}});
  // The sender is told where to write, and no sooner begins than the receiver has given up.
  ASSERT_TRUE(receiver_->Step(&in).ok());
  ASSERT_FALSE(in.done);
  while (!receiver_->Quiet() && Clock::now() < deadline) std::this_thread::yield();
  std::fill(received.begin(), received.end(), std::byte{9});
  const Status status = SenderFails();
  EXPECT_FALSE(status.ok()) << "its writes are refused";
  while (!sender_->Quiet() && Clock::now() < deadline) std::this_thread::yield();
  EXPECT_TRUE(sender_->Quiet());
  EXPECT_TRUE(
      std::all_of(received.begin(), received.end(), [](std::byte b) { return b == std::byte{9}; }));
}

TEST_F(Fault, AKilledPeerShowsAtOnce) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    here_.reset();
    (void)MakeOurReceiver().ok();
    while (true) ::pause();
  }
  there_.reset();
  ASSERT_TRUE(MakeOurSender().ok());
  const std::vector<std::byte> bytes(32 << 20);
  Begin(bytes);
  Progress progress;
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(sender_->Step(&progress).ok());
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  sender_->OnReady();
  ASSERT_TRUE(sender_->Step(&progress).ok());
  EXPECT_EQ(sender_->peer(), PeerState::kLost);
}

}  // namespace
}  // namespace hetccl::transport::rdma
