// Slots in the memory of a GPU, over the test twin of both vendors' drivers: where they come to
// lie, and, between two real ports, that what is sent through them arrives. The latter is skipped
// where there are no ports; see tests/rdma.
#include "xla_ffi/transport/rdma/device_slots.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "xla_ffi/device/host_space.h"
#include "xla_ffi/device/stream/stream_space.h"
#include "xla_ffi/device/stream/test_end.h"
#include "xla_ffi/device/twin/control.h"
#include "xla_ffi/transport/rdma/factory.h"
#include "xla_ffi/transport/rdma/test_fake_nic.h"
#include "xla_ffi/transport/rdma/test_ports.h"

namespace hetccl::transport::rdma {
namespace {

using device::Vendor;

std::shared_ptr<device::StreamSpace> Gpu(Vendor vendor) {
  std::shared_ptr<device::StreamSpace> space;
  const Status status =
      device::StreamSpace::Open({vendor, 0, "auto", twin::Library(vendor)}, &space);
  EXPECT_TRUE(status.ok()) << status.message();
  return space;
}

class Place : public ::testing::TestWithParam<Vendor> {
 protected:
  DeviceSlots Make() {
    return MakeDeviceSlots(nic_.device().get(), *Gpu(GetParam()), device::Direction::kIn, 1 << 20,
                           abi::kAccessRemoteWrite);
  }
  const twin::Control control_{twin::Library(GetParam())};
  FakeNic nic_;
};

TEST_P(Place, DmabufsComeFirst) {
  nic_.set_takes_dmabufs(true);
  const DeviceSlots slots = Make();
  EXPECT_EQ(slots.place, "device memory: dma-buf");
  EXPECT_NE(slots.memory, nullptr);
  EXPECT_NE(slots.copier, nullptr);
}

TEST_P(Place, ThenPeerMemory) {
  const DeviceSlots slots = Make();
  EXPECT_EQ(slots.place.rfind("device memory: peer memory (dma-buf: ", 0), 0u) << slots.place;
  EXPECT_NE(slots.place.find("Operation not supported"), std::string::npos) << slots.place;
  EXPECT_NE(slots.memory, nullptr);
}

TEST_P(Place, ElseTheHostWithTheReasons) {
  nic_.set_limit(0);
  const DeviceSlots slots = Make();
  EXPECT_EQ(slots.place.rfind("pinned host memory: this NIC cannot register device memory", 0), 0u)
      << slots.place;
  EXPECT_NE(slots.place.find("peer memory: rdma fake0"), std::string::npos) << slots.place;
  EXPECT_EQ(slots.memory, nullptr);
  EXPECT_EQ(nic_.registered(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Twin, Place, ::testing::Values(Vendor::kCuda, Vendor::kHip),
                         [](const auto& info) { return device::PlatformName(info.param); });

TEST(HostPlace, IsTheHost) {
  FakeNic nic;
  device::HostSpace host;
  const DeviceSlots slots =
      MakeDeviceSlots(nic.device().get(), host, device::Direction::kOut, 4096, 0);
  EXPECT_EQ(slots.place, "host memory");
  EXPECT_EQ(slots.memory, nullptr);
}

// A buffer of a space, filled and read by the test.
class Buffer {
 public:
  Buffer(std::shared_ptr<device::StreamSpace> gpu, size_t bytes)
      : gpu_(std::move(gpu)), bytes_(bytes) {
    if (gpu_ == nullptr) {
      host_.resize(bytes);
    } else {
      const device::ScopedCurrent current(gpu_->gpu());
      EXPECT_TRUE(gpu_->gpu().MemAlloc(bytes, &device_).ok());
    }
  }
  ~Buffer() {
    if (gpu_ == nullptr) return;
    const device::ScopedCurrent current(gpu_->gpu());
    EXPECT_TRUE(gpu_->gpu().MemFree(device_).ok());
  }
  std::byte* data() { return gpu_ == nullptr ? host_.data() : static_cast<std::byte*>(device_); }
  void Write(const std::vector<std::byte>& from) {
    if (gpu_ == nullptr) {
      host_ = from;
      return;
    }
    Copy([&](device::Stream stream) {
      return gpu_->gpu().MemcpyHtoDAsync(device_, from.data(), bytes_, stream);
    });
  }
  std::vector<std::byte> Read() {
    if (gpu_ == nullptr) return host_;
    std::vector<std::byte> to(bytes_);
    Copy([&](device::Stream stream) {
      return gpu_->gpu().MemcpyDtoHAsync(to.data(), device_, bytes_, stream);
    });
    return to;
  }

 private:
  template <typename Queue>
  void Copy(Queue queue) {
    const device::ScopedCurrent current(gpu_->gpu());
    device::Stream stream = nullptr;
    EXPECT_TRUE(gpu_->gpu().StreamCreate(false, &stream).ok());
    EXPECT_TRUE(queue(stream).ok());
    EXPECT_TRUE(gpu_->gpu().StreamSynchronize(stream).ok());
    EXPECT_TRUE(gpu_->gpu().StreamDestroy(stream).ok());
  }
  const std::shared_ptr<device::StreamSpace> gpu_;
  const size_t bytes_;
  std::vector<std::byte> host_;
  void* device_ = nullptr;
};

void Move(Sender* sender, Receiver* receiver, Buffer* from, Buffer* to, size_t bytes) {
  WireHeader header = MakeHeader(MessageType::kData);
  header.payload_bytes = bytes;
  sender->Begin(header, {{from->data(), bytes}});
  Progress out, in;
  const WireHeader* head = nullptr;
  const TimePoint deadline = Clock::now() + std::chrono::seconds(30);
  size_t moved = 0;
  while (!(out.done && in.done) && Clock::now() < deadline) {
    if (!out.done) {
      const Status status = sender->Step(&out);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    if (in.done) continue;
    if (head == nullptr) {
      const Status status = receiver->Peek(&head);
      ASSERT_TRUE(status.ok()) << status.message();
      if (head == nullptr) continue;
      receiver->Accept({{to->data(), bytes}});
    }
    const Status status = receiver->Step(&in);
    ASSERT_TRUE(status.ok()) << status.message();
    moved += in.bytes;
    std::this_thread::yield();
  }
  ASSERT_TRUE(out.done && in.done);
  EXPECT_EQ(moved, bytes);
}

TEST(BetweenPorts, WhatGpusSendThroughTheirSlotsArrives) {
  std::string why_not;
  const std::vector<Options> ports = TestPorts(&why_not);
  if (ports.empty()) GTEST_SKIP() << why_not;
  const char* shim = std::getenv("HETCCL_TEST_DMABUF_SHIM");
  const bool dmabuf = shim != nullptr && shim[0] != 0;
  device::HostSpace host;
  const std::shared_ptr<device::StreamSpace> cuda = Gpu(Vendor::kCuda), hip = Gpu(Vendor::kHip);
  for (auto [left, right] : {std::pair(cuda, hip), {nullptr, hip}, {cuda, nullptr}}) {
    device::Space& left_space = left ? static_cast<device::Space&>(*left) : host;
    device::Space& right_space = right ? static_cast<device::Space&>(*right) : host;
    int fds[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    std::vector<UniqueFd> here, there;
    here.emplace_back(fds[0]);
    there.emplace_back(fds[1]);
    std::unique_ptr<Sender> sender;
    std::unique_ptr<Receiver> receiver;
    Status sent;
    std::thread other([&, left_socket = &here, space = &left_space] {
      sent = MakeSender(std::move(*left_socket), *space, {256 << 10, 4}, ports[0], &sender);
    });
    const Status received =
        MakeReceiver(std::move(there), right_space, {256 << 10, 4}, ports[1], &receiver);
    other.join();
    ASSERT_TRUE(sent.ok()) << sent.message();
    ASSERT_TRUE(received.ok()) << received.message();
    for (const auto& [space, place] :
         {std::pair(left, sender->route().slots), {right, receiver->route().slots}}) {
      EXPECT_EQ(place.rfind(space ? "device memory: " : "host memory", 0), 0u) << place;
      EXPECT_TRUE(!space || !dmabuf || place == "device memory: dma-buf") << place;
    }
    for (size_t bytes :
         {size_t{0}, size_t{5}, size_t{3000}, size_t{200000}, size_t{5000001}, size_t{1} << 20}) {
      Buffer from(left, bytes + 1), to(right, bytes + 1);
      std::vector<std::byte> pattern(bytes + 1);
      for (size_t i = 0; i < bytes; ++i) pattern[i] = static_cast<std::byte>((i * 31 + bytes) >> 3);
      from.Write(pattern);
      to.Write(std::vector<std::byte>(bytes + 1));
      Move(sender.get(), receiver.get(), &from, &to, bytes);
      EXPECT_TRUE(to.Read() == pattern) << bytes;
    }
    // No CPU has copied what lies on a GPU.
    EXPECT_TRUE(!left || sender->route().copied == 0);
    EXPECT_TRUE(!right || receiver->route().copied == 0);
  }
}

}  // namespace
}  // namespace hetccl::transport::rdma
