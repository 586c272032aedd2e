// Which memory of a channel between two real ports is registered, and what happens where it cannot
// be. Skipped where there are no ports; see tests/rdma.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <linux/udmabuf.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "xla_ffi/transport/rdma/test_channel.h"

namespace hetccl::transport::rdma {
namespace {

using Memory = Channel;

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

TEST_F(Memory, WithoutLockedMemoryThereIsNoChannelAndTheReasonIsTold) {
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

TEST_F(Memory, WhatIsBeyondTheLimitOfLockedMemoryGoesThroughSlots) {
  InLimitedProcess(6 << 20, [this] {  // slots of 2 MB on both sides, and some
    MakeBoth();
    std::vector<std::byte> bytes(24 << 20), received;
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 >> 4);
    ASSERT_TRUE(Move(bytes, &received));
    EXPECT_TRUE(received == bytes);
    EXPECT_GT(sender_->route().copied + receiver_->route().copied, 0u);
  });
}

TEST_F(Memory, NothingLargeIsCopied) {
  MakeBoth();
  std::vector<std::byte> received;
  const std::vector<std::byte> bytes(40 << 20, std::byte{3});
  ASSERT_TRUE(Move(bytes, &received));
  EXPECT_TRUE(received == bytes);
  EXPECT_EQ(sender_->route().copied, 0u);
  EXPECT_EQ(receiver_->route().copied, 0u);
  EXPECT_EQ(sender_->route().device, ports_[0].device);
}

// Memory that is unmapped and mapped anew at one address, which is not the begin of a page.
class Remapped {
 public:
  explicit Remapped(size_t bytes) : bytes_(bytes + kInPage) { Map(nullptr, 0); }
  ~Remapped() { ::munmap(data_, bytes_); }
  void MapAnew() {
    ::munmap(data_, bytes_);
    Map(data_, MAP_FIXED_NOREPLACE);
  }
  std::byte* data() const { return static_cast<std::byte*>(data_) + kInPage; }
  std::vector<std::byte> contents() const { return {data(), data() + bytes_ - kInPage}; }

 private:
  static constexpr size_t kInPage = 64;

  void Map(void* at, int flags) {
    data_ = ::mmap(at, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    ASSERT_NE(data_, MAP_FAILED);
  }

  const size_t bytes_;
  void* data_ = nullptr;
};

class Registrations : public Memory {
 protected:
  static constexpr size_t kBytes = 3 << 20;

  // Sends several messages, each from and into memory that was mapped anew, and says how many
  // registrations each of them took at both ends together.
  std::vector<uint64_t> Move() {
    std::shared_ptr<Device> devices[2];
    for (int i : {0, 1}) EXPECT_TRUE(Device::Open(ports_[i].device, &devices[i]).ok());
    const auto count = [&] {
      return devices[0]->registrations() +
             (devices[0] == devices[1] ? 0 : devices[1]->registrations());
    };
    MakeBoth();
    Remapped from(kBytes), to(kBytes);
    std::vector<uint64_t> made;
    for (size_t message = 0; message < 4; ++message) {
      from.MapAnew();
      to.MapAnew();
      for (size_t i = 0; i < kBytes; ++i) {
        from.data()[i] = static_cast<std::byte>((i * 7 + message * 31) >> 4);
      }
      const uint64_t before = count();
      BeginFrom({from.data(), kBytes});
      EXPECT_TRUE(FinishInto([&](size_t) -> MutableSpan { return {to.data(), kBytes}; }));
      EXPECT_TRUE(to.contents() == from.contents()) << "message " << message;
      made.push_back(count() - before);
    }
    EXPECT_EQ(sender_->route().copied + receiver_->route().copied, 0u);
    return made;
  }
};

TEST_F(Registrations, AreMadeForEachMessage) {
  EXPECT_EQ(Move(), (std::vector<uint64_t>{2, 2, 2, 2}));
  EXPECT_EQ(sender_->route().slots, "host memory");
}

TEST_F(Registrations, AreKeptAndFollowMemoryThatIsMappedAnew) {
  for (Options& port : ports_) {
    port.on_demand_paging = true;
    const std::string why_not = WhyNotOnDemand(port);
    if (!why_not.empty()) GTEST_SKIP() << port.device << ": " << why_not;
  }
  EXPECT_EQ(Move(), (std::vector<uint64_t>{2, 0, 0, 0}));
  EXPECT_EQ(sender_->route().slots, "host memory; registrations of buffers are kept");
  EXPECT_EQ(receiver_->route().slots, "host memory; registrations of buffers are kept");
}

TEST_F(Registrations, AreMadeForEachMessageAndTheReasonIsToldWithoutOnDemandPaging) {
  const std::string why_not = WhyNotOnDemand(ports_[0]);
  if (why_not.empty()) GTEST_SKIP() << ports_[0].device << " has on-demand paging";
  for (Options& port : ports_) port.on_demand_paging = true;
  EXPECT_EQ(Move(), (std::vector<uint64_t>{2, 2, 2, 2}));
  EXPECT_EQ(sender_->route().slots,
            "host memory; buffers are registered for each exchange: " + why_not);
}

TEST_F(Memory, ManySpansDoNotFillTheQueue) {
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

TEST_F(Memory, SlotsMayLieInADmabuf) {
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
