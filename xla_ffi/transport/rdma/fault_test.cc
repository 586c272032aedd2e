// What goes wrong between two real ports: wrong keys, lost links, limits of locked memory, peers
// that break the protocol. Skipped where there are no ports; see tests/rdma.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <linux/udmabuf.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "xla_ffi/device/host_space.h"
#include "xla_ffi/transport/rdma/factory.h"
#include "xla_ffi/transport/rdma/line.h"
#include "xla_ffi/transport/rdma/policy.h"
#include "xla_ffi/transport/rdma/test_ports.h"
#include "xla_ffi/transport/span_cursor.h"

namespace hetccl::transport::rdma {
namespace {

constexpr auto kPatience = std::chrono::seconds(20);

// The other end, by hand: does as it is told, not as it should.
class HandMade {
 public:
  HandMade(int socket, const Options& options) : line_(UniqueFd(socket), options) {}

  // `receives`: how many it posts, of those that it should.
  Status Open(uint32_t receives) {
    mine_.role = Role::kReceiver;
    return line_.Open({16, receives}, &mine_);
  }
  void UseMemory(void* data, size_t bytes) {
    ASSERT_TRUE(line_.device()
                    ->Register(data, bytes, abi::kAccessLocalWrite | abi::kAccessRemoteWrite,
                               &registration_)
                    .ok());
    SetSlots(reinterpret_cast<uint64_t>(data), registration_->rkey());
  }
  void SetSlots(uint64_t address, uint32_t rkey) {
    mine_.address = address;
    mine_.rkey = rkey;
    mine_.slot_bytes = 4096;
    mine_.slots = 4;
  }
  Status Meet() {
    std::shared_ptr<Registration> probe;
    Status status =
        line_.device()->Register(&words_, sizeof(words_), abi::kAccessLocalWrite, &words_key_);
    if (!status.ok()) return status;
    return line_.Meet(mine_, &words_, words_key_->lkey());
  }
  // Writes grants into the sender's board.
  Status Offer(const Grant& grant) {
    words_.grants[0] = grant;
    Write write = {words_.grants, words_key_->lkey(), sizeof(Grant),
                   line_.theirs().address + offsetof(SenderBoard, grants), line_.theirs().rkey};
    write.has_immediate = true;
    write.immediate = Pack(Immediate::kGrant, 1);
    return line_.queue_pair().Post(write);
  }
  Status Tell(uint32_t immediate) {
    Write write = {&words_, words_key_->lkey(), 0, line_.theirs().address, line_.theirs().rkey};
    write.has_immediate = true;
    write.immediate = immediate;
    return line_.queue_pair().Post(write);
  }
  Line& line() { return line_; }
  EndpointRecord& record() { return mine_; }

 private:
  Line line_;
  EndpointRecord mine_;
  SenderBoard words_ = {};
  std::shared_ptr<Registration> registration_, words_key_;
};

class Fault : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why_not;
    ports_ = TestPorts(&why_not);
    if (ports_.empty()) GTEST_SKIP() << why_not;
    int fds[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    here_ = UniqueFd(fds[0]);
    there_ = UniqueFd(fds[1]);
  }

  Status MakeOurSender(const Staging& staging = {}) {
    std::vector<UniqueFd> sockets;
    sockets.push_back(std::move(here_));
    return MakeSender(std::move(sockets), space_, staging, ports_[0], &sender_);
  }
  Status MakeOurReceiver(const Staging& staging = {}) {
    std::vector<UniqueFd> sockets;
    sockets.push_back(std::move(there_));
    return MakeReceiver(std::move(sockets), space_, staging, ports_[1], &receiver_);
  }
  void MakeBoth() {
    Status status;
    std::thread other([&] { status = MakeOurSender(); });
    const Status received = MakeOurReceiver();
    other.join();
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(received.ok()) << received.message();
  }
  // Our sender and a peer by hand, which `prepare` sets up after Open.
  void MakeWithHandMade(uint32_t receives, const std::function<void(HandMade*)>& prepare) {
    peer_ = std::make_unique<HandMade>(there_.release(), ports_[1]);
    Status status;
    std::thread other([&] { status = MakeOurSender(); });
    Status met = peer_->Open(receives);
    if (met.ok()) prepare(peer_.get());
    if (met.ok()) met = peer_->Meet();
    other.join();
    ASSERT_TRUE(met.ok()) << met.message();
    ASSERT_TRUE(status.ok()) << status.message();
  }

  void Begin(const std::vector<std::byte>& bytes) {
    WireHeader header = MakeHeader(MessageType::kData);
    header.payload_bytes = bytes.size();
    sender_->Begin(header, {{bytes.data(), bytes.size()}});
  }
  // Steps until there is an error.
  Status SenderFails() {
    const TimePoint deadline = Clock::now() + kPatience;
    Progress progress;
    while (Clock::now() < deadline) {
      if (Status status = sender_->Step(&progress); !status.ok()) return status;
      std::this_thread::yield();
    }
    return Status();
  }
  // Moves one message; false if an error came.
  bool Move(const std::vector<std::byte>& bytes, std::vector<std::byte>* received) {
    Begin(bytes);
    return Finish(received);
  }
  bool Finish(std::vector<std::byte>* received) {
    Progress out, in;
    const WireHeader* header = nullptr;
    const TimePoint deadline = Clock::now() + kPatience;
    while (!(in.done && out.done) && Clock::now() < deadline) {
      if (!out.done && !sender_->Step(&out).ok()) return false;
      if (in.done) continue;
      if (header == nullptr) {
        if (!receiver_->Peek(&header).ok()) return false;
        if (header == nullptr) continue;
        received->assign(header->payload_bytes, std::byte{0});
        receiver_->Accept({{received->data(), received->size()}});
      }
      if (!receiver_->Step(&in).ok()) return false;
    }
    return in.done && out.done;
  }

  std::vector<Options> ports_;
  UniqueFd here_, there_;
  device::HostSpace space_;
  std::unique_ptr<Sender> sender_;
  std::unique_ptr<Receiver> receiver_;
  std::unique_ptr<HandMade> peer_;
};

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
  std::vector<std::byte> slots(4 * 4096), target(1 << 20);
  MakeWithHandMade(8, [&](HandMade* peer) {
    peer->UseMemory(slots.data(), slots.size());
    peer->record().flags = kGrantsMemory;
  });
  const std::vector<std::byte> bytes(1 << 20, std::byte{1});
  Begin(bytes);
  Progress progress;
  ASSERT_TRUE(sender_->Step(&progress).ok());
  ASSERT_TRUE(peer_->Offer({reinterpret_cast<uint64_t>(target.data()), 0x123456, 1 << 20}).ok());
  const Status status = SenderFails();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.kind(), ErrorKind::kCorrupt);
  EXPECT_NE(status.message().find("remote access error"), std::string::npos) << status.message();
  EXPECT_EQ(target[0], std::byte{0});
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
  const TimePoint begin = Clock::now();
  const Status status = MakeOurSender();
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("did not send its endpoint record"), std::string::npos);
  EXPECT_LT(ToSeconds(Clock::now() - begin), 8);
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

// Gives up the right to lock more memory than the limit.
void LimitLockedMemory(size_t bytes) {
  const rlimit limit = {bytes, bytes};
  ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &limit), 0);
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2] = {};
  ASSERT_EQ(::syscall(SYS_capget, &header, data), 0);
  for (auto* set : {&data[0].effective, &data[0].permitted}) *set &= ~(1u << CAP_IPC_LOCK);
  ASSERT_EQ(::syscall(SYS_capset, &header, data), 0);
}

// In a process of its own, whose exit status says whether `body` found everything in order.
void InLimitedProcess(size_t bytes, const std::function<void()>& body) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    LimitLockedMemory(bytes);
    body();
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST_F(Fault, WithoutLockedMemoryThereIsNoChannelAndTheReasonIsTold) {
  InLimitedProcess(64 << 10, [this] {
    Status sent;
    std::thread other([&] { sent = MakeOurSender(); });
    const Status received = MakeOurReceiver();
    other.join();
    ASSERT_FALSE(sent.ok());
    ASSERT_FALSE(received.ok());
    EXPECT_NE((sent.message() + received.message()).find("ulimit -l"), std::string::npos)
        << sent.message() << received.message();
  });
}

TEST_F(Fault, WhatIsBeyondTheLimitOfLockedMemoryGoesThroughSlots) {
  InLimitedProcess(6 << 20, [this] {  // slots of 2 MB on both sides, and some
    MakeBoth();
    std::vector<std::byte> bytes(24 << 20), received;
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 >> 4);
    ASSERT_TRUE(Move(bytes, &received));
    EXPECT_TRUE(received == bytes);
    EXPECT_GT(sender_->route().copied + receiver_->route().copied, 0u);
  });
}

TEST_F(Fault, NothingLargeIsCopied) {
  MakeBoth();
  std::vector<std::byte> received;
  const std::vector<std::byte> bytes(40 << 20, std::byte{3});
  ASSERT_TRUE(Move(bytes, &received));
  EXPECT_TRUE(received == bytes);
  EXPECT_EQ(sender_->route().copied, 0u);
  EXPECT_EQ(receiver_->route().copied, 0u);
  EXPECT_EQ(sender_->route().device, ports_[0].device);
}

TEST_F(Fault, ManySpansDoNotFillTheQueue) {
  MakeBoth();
  std::vector<std::byte> bytes(24 << 20), received(bytes.size());
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 >> 4);
  ConstPayload spans;
  for (size_t at = 0; at < bytes.size(); at += 33000) {
    spans.push_back({&bytes[at], std::min<size_t>(33000, bytes.size() - at)});
  }
  WireHeader header = MakeHeader(MessageType::kData);
  header.payload_bytes = bytes.size();
  sender_->Begin(header, std::move(spans));
  ASSERT_TRUE(Finish(&received));
  EXPECT_TRUE(received == bytes);
  EXPECT_EQ(sender_->route().copied, 0u);
}

TEST_F(Fault, SlotsMayLieInADmabuf) {
  constexpr size_t kBytes = 4 * 4096;
  UniqueFd maker(::open("/dev/udmabuf", O_RDWR | O_CLOEXEC));
  if (!maker.valid()) GTEST_SKIP() << "no /dev/udmabuf";
  UniqueFd memfd(::memfd_create("slots", MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(memfd.get(), kBytes), 0);
  ASSERT_EQ(::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  udmabuf_create create = {};
  create.memfd = static_cast<uint32_t>(memfd.get());
  create.flags = UDMABUF_FLAGS_CLOEXEC;
  create.size = kBytes;
  UniqueFd dmabuf(::ioctl(maker.get(), UDMABUF_CREATE, &create));
  ASSERT_TRUE(dmabuf.valid());
  void* mapped = ::mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, memfd.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const auto* memory = static_cast<const std::byte*>(mapped);
  std::shared_ptr<Device> device;
  ASSERT_TRUE(Device::Open(ports_[1].device, &device).ok());
  std::shared_ptr<Registration> registration;
  constexpr uint64_t kAddress = 0x10000000;  // only the NIC knows it by this
  const Status registered =
      device->RegisterDmabuf(dmabuf.get(), 0, kBytes, kAddress,
                             abi::kAccessLocalWrite | abi::kAccessRemoteWrite, &registration);
  if (!registered.ok() && registered.message().find("not supported") != std::string::npos) {
    GTEST_SKIP() << registered.message();
  }
  ASSERT_TRUE(registered.ok()) << registered.message();
  MakeWithHandMade(8, [&](HandMade* peer) { peer->SetSlots(kAddress, registration->rkey()); });
  std::vector<std::byte> bytes(3000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i);
  Begin(bytes);
  std::vector<Completion> arrived;
  const TimePoint deadline = Clock::now() + kPatience;
  Progress progress;
  while (arrived.empty() && Clock::now() < deadline) {
    ASSERT_TRUE(sender_->Step(&progress).ok());
    ASSERT_TRUE(peer_->line().Poll(&arrived).ok());
  }
  ASSERT_FALSE(arrived.empty());
  EXPECT_EQ(KindOf(arrived[0].immediate), Immediate::kMessage);
  WireHeader header;
  std::memcpy(&header, memory, sizeof(header));
  EXPECT_EQ(header.payload_bytes, bytes.size());
  EXPECT_EQ(std::memcmp(memory + kPayloadOffset, bytes.data(), bytes.size()), 0);
  peer_->line().Close();
  registration.reset();
  ::munmap(mapped, kBytes);
}

}  // namespace
}  // namespace hetccl::transport::rdma
