// What is registered, for how long, and what happens if it cannot be.
#include "xla_ffi/transport/rdma/device.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "xla_ffi/device/host_space.h"
#include "xla_ffi/transport/rdma/on_demand.h"
#include "xla_ffi/transport/rdma/policy.h"
#include "xla_ffi/transport/rdma/registered_spans.h"
#include "xla_ffi/transport/rdma/source.h"
#include "xla_ffi/transport/rdma/test_fake_nic.h"

namespace hetccl::transport::rdma {
namespace {

TEST(Register, SameMemoryIsSharedWhileItIsInUse) {
  FakeNic nic;
  std::vector<std::byte> memory(4096);
  std::shared_ptr<Registration> one, two, other_access;
  ASSERT_TRUE(nic.device()->Register(memory.data(), 4096, 0, &one).ok());
  ASSERT_TRUE(nic.device()->Register(memory.data(), 4096, 0, &two).ok());
  EXPECT_EQ(one, two);
  ASSERT_TRUE(
      nic.device()->Register(memory.data(), 4096, abi::kAccessRemoteWrite, &other_access).ok());
  EXPECT_NE(one->lkey(), other_access->lkey());
  EXPECT_EQ(nic.registered(), 2u);
  one.reset();
  EXPECT_EQ(nic.registered(), 2u);
  two.reset();
  other_access.reset();
  EXPECT_EQ(nic.registered(), 0u);
}

TEST(Register, NothingIsKeptForMemoryThatMayHaveBeenFreed) {
  FakeNic nic;
  std::vector<std::byte> memory(4096);
  uint32_t before = 0;
  for (int i = 0; i < 3; ++i) {
    std::shared_ptr<Registration> registration;
    ASSERT_TRUE(nic.device()->Register(memory.data(), 4096, 0, &registration).ok());
    EXPECT_NE(registration->lkey(), before) << "a registration outlived its last user";
    before = registration->lkey();
  }
  EXPECT_EQ(nic.device()->registrations(), 3u);
}

TEST(Register, IsThreadSafe) {
  FakeNic nic;
  std::vector<std::byte> memory(1 << 16);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        std::shared_ptr<Registration> registration;
        EXPECT_TRUE(nic.device()->Register(&memory[i % 4 * 4096], 4096, 0, &registration).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(nic.registered(), 0u);
}

constexpr int kOnDemand = abi::kAccessLocalWrite | abi::kAccessRemoteWrite | abi::kAccessOnDemand;

// The key that the NIC knows the memory by after it has been registered and let go.
uint32_t RegisterOnce(FakeNic* nic, std::byte* data, size_t bytes, int access = kOnDemand) {
  std::shared_ptr<Registration> registration;
  EXPECT_TRUE(nic->device()->Register(data, bytes, access, &registration).ok());
  return registration->lkey();
}

TEST(OnDemand, RegistrationsAreKeptByAddressLengthAndAccess) {
  FakeNic nic;
  std::vector<std::byte> memory(3 * 4096);
  const uint32_t first = RegisterOnce(&nic, &memory[0], 4096);
  EXPECT_NE(RegisterOnce(&nic, &memory[4096], 4096), first);
  EXPECT_NE(RegisterOnce(&nic, &memory[0], 8192), first);
  EXPECT_NE(RegisterOnce(&nic, &memory[0], 4096, abi::kAccessOnDemand), first);
  EXPECT_EQ(nic.registered(), 4u);
  EXPECT_EQ(RegisterOnce(&nic, &memory[0], 4096), first);
  EXPECT_EQ(nic.device()->registrations(), 4u);
  EXPECT_EQ(nic.registered(), 4u);
}

TEST(OnDemand, OneThatIsInUseIsShared) {
  FakeNic nic;
  std::vector<std::byte> memory(4096);
  RegisterOnce(&nic, memory.data(), 4096);
  std::shared_ptr<Registration> one, two;
  ASSERT_TRUE(nic.device()->Register(memory.data(), 4096, kOnDemand, &one).ok());
  ASSERT_TRUE(nic.device()->Register(memory.data(), 4096, kOnDemand, &two).ok());
  EXPECT_EQ(one, two);
  EXPECT_EQ(nic.device()->registrations(), 1u);
}

TEST(OnDemand, TheOneUsedLongestAgoGoesAndNoneInUse) {
  FakeNic nic;
  std::vector<std::byte> memory(Device::kMostKept + 3);
  std::shared_ptr<Registration> in_use;
  ASSERT_TRUE(nic.device()->Register(&memory[Device::kMostKept + 2], 1, kOnDemand, &in_use).ok());
  std::vector<uint32_t> keys;
  for (size_t i = 0; i < Device::kMostKept; ++i) {
    keys.push_back(RegisterOnce(&nic, &memory[i], 1));
  }
  EXPECT_EQ(nic.registered(), Device::kMostKept + 1);
  EXPECT_EQ(RegisterOnce(&nic, &memory[0], 1), keys[0]);
  RegisterOnce(&nic, &memory[Device::kMostKept], 1);
  EXPECT_EQ(nic.registered(), Device::kMostKept + 1);
  EXPECT_EQ(RegisterOnce(&nic, &memory[0], 1), keys[0]);
  EXPECT_NE(RegisterOnce(&nic, &memory[1], 1), keys[1]);
  // What was in use all the time is the newest when it comes back.
  const uint32_t key = in_use->lkey();
  in_use.reset();
  EXPECT_EQ(RegisterOnce(&nic, &memory[Device::kMostKept + 2], 1), key);
  EXPECT_EQ(nic.registered(), Device::kMostKept);
}

TEST(OnDemand, WhatWasGivenUpIsNotKept) {
  FakeNic nic;
  std::vector<std::byte> memory(2 * kRegisterBytes);
  RegisteredSpans spans;
  spans.Make(nic.device(), kOnDemand);
  size_t bytes = 0;
  const Registration* registration = nullptr;
  for (const bool abandon : {false, true}) {
    ASSERT_TRUE(spans.Cover(memory.data(), memory.size(), &bytes, &registration).ok());
    ASSERT_TRUE(spans.Cover(&memory[bytes], kRegisterBytes, &bytes, &registration).ok());
    abandon ? spans.Abandon() : spans.Release();
    EXPECT_EQ(nic.registered(), abandon ? 0u : 2u);
  }
}

TEST(OnDemand, NothingIsLeftBehindByThreadsOrByTheDevice) {
  FakeNic nic;
  std::vector<std::byte> memory(1 << 16);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) RegisterOnce(&nic, &memory[i % 4 * 4096], 4096);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(nic.registered(), 4u) << "two threads may make one each, but one is kept";
  nic.DropDevice();
  EXPECT_EQ(nic.registered(), 0u);
}

TEST(OnDemand, TheReasonIsToldWhereItIsNot) {
  const auto why_not = [](auto&& change) {
    FakeNic nic;
    change(&nic);
    return TryOnDemand(nic.device(), Options());
  };
  EXPECT_EQ(why_not([](FakeNic* nic) { nic->set_odp_caps(0, 0); }),
            "the device, or its driver in this kernel, has no on-demand paging");
  EXPECT_EQ(why_not([](FakeNic* nic) { nic->set_odp_caps(abi::kOdpSupport, 1); }),
            "the device has on-demand paging, but not for RDMA writes of reliable connections");
  EXPECT_NE(why_not([](FakeNic* nic) { nic->set_pages_on_demand(false); }).find("not supported"),
            std::string::npos);
  EXPECT_NE(why_not([](FakeNic* nic) { nic->extended().size = 8; }).find("does not say"),
            std::string::npos);
  EXPECT_NE(why_not([](FakeNic* nic) {
              nic->extended().context.abi_compat = nullptr;
            }).find("does not say"),
            std::string::npos);
}

TEST(OnDemand, IsTriedOnceForADevice) {
  FakeNic nic;
  EXPECT_EQ(nic.device()->WhyNotOnDemand([] { return "it is old"; }), "it is old");
  EXPECT_EQ(nic.device()->WhyNotOnDemand([] { return "asked again"; }), "it is old");
}

TEST(Register, ErrorsNameDeviceAndSize) {
  FakeNic nic;
  nic.set_limit(100);
  std::vector<std::byte> memory(4096);
  std::shared_ptr<Registration> registration;
  const Status status = nic.device()->Register(memory.data(), 4096, 0, &registration);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("rdma fake0"), std::string::npos);
  EXPECT_NE(status.message().find("4096 bytes"), std::string::npos);
  const Status dmabuf = nic.device()->RegisterDmabuf(0, 0, 1, 0, 0, &registration);
  ASSERT_FALSE(dmabuf.ok());
  EXPECT_NE(dmabuf.message().find("Operation not supported"), std::string::npos);
}

// Takes all of a payload out of a source, as a sender does, and says how it was offered.
struct Taken {
  std::vector<std::byte> bytes;
  size_t staged = 0;
  size_t pieces = 0;
};

Taken TakeAll(Source* source, ConstPayload payload, size_t limit) {
  Taken taken;
  source->Begin(std::move(payload));
  while (source->remaining() > 0) {
    EXPECT_TRUE(source->Pump().ok());
    Piece piece;
    EXPECT_TRUE(source->Next(limit, &piece).ok());
    if (piece.bytes == 0) {
      ADD_FAILURE() << "stuck with " << source->remaining() << " bytes left";
      break;
    }
    taken.bytes.insert(taken.bytes.end(), piece.data, piece.data + piece.bytes);
    if (piece.staged) taken.staged += piece.bytes;
    ++taken.pieces;
    source->Posted(piece);
    source->Completed(piece);
  }
  source->Release();
  return taken;
}

class SourceTest : public ::testing::Test {
 protected:
  SourceTest() {
    EXPECT_TRUE(source_.Make(nic_.device(), /*paging=*/0, space_, {8192, 3}).ok());
    for (size_t i = 0; i < memory_.size(); ++i) memory_[i] = static_cast<std::byte>(i * 131 >> 3);
  }
  ConstPayload Whole() const { return {{memory_.data(), memory_.size()}}; }

  FakeNic nic_;
  device::HostSpace space_;
  std::vector<std::byte> memory_ = std::vector<std::byte>(20 << 20);
  Source source_;
};

TEST_F(SourceTest, LargePayloadsAreOfferedWhereTheyLie) {
  const Taken taken = TakeAll(&source_, Whole(), kWriteBytes);
  EXPECT_TRUE(taken.bytes == memory_);
  EXPECT_EQ(taken.staged, 0u);
  EXPECT_EQ(source_.copied(), 0u);
  EXPECT_EQ(nic_.registered(), 1u) << "the slots alone";
}

TEST_F(SourceTest, TheUsersMemoryAloneIsPagedOnDemand) {
  Source source;
  ASSERT_TRUE(source.Make(nic_.device(), abi::kAccessOnDemand, space_, {8192, 3}).ok());
  const uint64_t slots = nic_.device()->registrations();
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(TakeAll(&source, Whole(), kWriteBytes).bytes == memory_);
  EXPECT_EQ(nic_.device()->registrations(), slots + 2) << "20 MB are two pieces, each kept";
  EXPECT_EQ(nic_.registered(), slots + 2);
}

TEST_F(SourceTest, SmallPayloadsAndScatteredOnesAreCopied) {
  Taken taken = TakeAll(&source_, {{memory_.data(), 100000}}, kWriteBytes);
  EXPECT_EQ(taken.staged, 100000u);
  ConstPayload scattered;
  for (size_t at = 0; at < kDirectFrom * 2; at += 1000) scattered.push_back({&memory_[at], 1000});
  taken = TakeAll(&source_, scattered, kWriteBytes);
  EXPECT_EQ(taken.staged, taken.bytes.size());
  EXPECT_EQ(source_.copied(), 100000 + taken.bytes.size());
}

TEST_F(SourceTest, WhatCannotBeRegisteredIsCopied) {
  nic_.set_limit(4 << 20);  // less than is registered at once, more than the last piece
  const Taken taken = TakeAll(&source_, Whole(), 3000);
  EXPECT_TRUE(taken.bytes == memory_);
  EXPECT_EQ(taken.staged, memory_.size());
}

TEST_F(SourceTest, SlotsAreNotReusedBeforeTheNicHasDoneWithThem) {
  source_.Begin({{memory_.data(), 100000}});
  std::vector<Piece> posted;
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(source_.Pump().ok());
    Piece piece;
    ASSERT_TRUE(source_.Next(kWriteBytes, &piece).ok());
    if (piece.bytes == 0) continue;
    source_.Posted(piece);
    posted.push_back(piece);
  }
  ASSERT_EQ(posted.size(), 3u) << "as many as there are slots";
  source_.Completed(posted[0]);
  ASSERT_TRUE(source_.Pump().ok());
  Piece piece;
  ASSERT_TRUE(source_.Next(kWriteBytes, &piece).ok());
  EXPECT_EQ(piece.data, posted[0].data);
}

TEST(Cover, RegistersPieceByPiece) {
  FakeNic nic;
  std::vector<std::byte> memory(kRegisterBytes + 1000);
  RegisteredSpans spans;
  const Registration* first = nullptr;
  const Registration* second = nullptr;
  size_t bytes = 0;
  spans.Make(nic.device(), 0);
  const auto cover = [&](size_t at, const Registration** registration) {
    return spans.Cover(&memory[at], memory.size() - at, &bytes, registration);
  };
  ASSERT_TRUE(cover(0, &first).ok());
  EXPECT_EQ(bytes, kRegisterBytes);
  ASSERT_TRUE(cover(4096, &second).ok());
  EXPECT_EQ(first, second);
  EXPECT_EQ(bytes, kRegisterBytes - 4096);
  ASSERT_TRUE(cover(kRegisterBytes, &second).ok());
  EXPECT_NE(first, second);
  EXPECT_EQ(bytes, 1000u);
  EXPECT_EQ(nic.registered(), 2u);
  spans.Release();
  EXPECT_EQ(nic.registered(), 0u);
}

}  // namespace
}  // namespace hetccl::transport::rdma
