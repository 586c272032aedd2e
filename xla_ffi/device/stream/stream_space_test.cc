// What a GPU's space promises, over the test twin of both vendors' drivers.
#include "xla_ffi/device/stream/stream_space.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "xla_ffi/common/test_status.h"
#include "xla_ffi/device/stream/test_end.h"
#include "xla_ffi/device/twin/control.h"

namespace hetccl::device {
namespace {

class StreamSpaceTest : public ::testing::TestWithParam<Vendor> {
 protected:
  StreamSpaceTest() { EXPECT_OK(Open("auto", &space_)); }
  Status Open(const std::string& sync, std::shared_ptr<StreamSpace>* space, int ordinal = 0) {
    return StreamSpace::Open({GetParam(), ordinal, sync, twin::Library(GetParam())}, space);
  }
  std::vector<unsigned char> Read(const void* device, size_t bytes) {
    const ScopedCurrent current(space_->gpu());
    std::vector<unsigned char> host(bytes);
    Stream stream = nullptr;
    EXPECT_OK(space_->gpu().StreamCreate(false, &stream));
    EXPECT_OK(space_->gpu().MemcpyDtoHAsync(host.data(), device, bytes, stream));
    EXPECT_OK(space_->gpu().StreamSynchronize(stream));
    EXPECT_OK(space_->gpu().StreamDestroy(stream));
    return host;
  }

  const twin::Control control_{twin::Library(GetParam())};
  std::shared_ptr<StreamSpace> space_;
};

TEST_P(StreamSpaceTest, IsOnePerDeviceAndSync) {
  std::shared_ptr<StreamSpace> again, memops, other, device;
  EXPECT_OK(Open("auto", &again));
  EXPECT_OK(Open("memops", &memops));
  EXPECT_OK(Open("hostfunc", &other));
  EXPECT_OK(Open("auto", &device, 1));
  EXPECT_EQ(space_, again);
  EXPECT_EQ(space_, memops);
  EXPECT_NE(space_, other);
  EXPECT_NE(space_, device);
  EXPECT_EQ(space_->sync(), StreamSync::kMemops);
  EXPECT_EQ(other->sync(), StreamSync::kHostFunc);
}

TEST_P(StreamSpaceTest, SaysWhatIsWrongWithWhatWasAskedFor) {
  std::shared_ptr<StreamSpace> space;
  EXPECT_NE(Open("always", &space).message().find("auto, memops or hostfunc"), std::string::npos);
  EXPECT_FALSE(Open("auto", &space, 99).ok());
  EXPECT_FALSE(StreamSpace::Open({GetParam(), 0, "auto", "/nowhere/libdriver.so"}, &space).ok());
}

TEST_P(StreamSpaceTest, FillsEveryWidthAndLength) {
  const ScopedCurrent current(space_->gpu());
  void* memory = nullptr;
  ASSERT_TRUE(space_->gpu().MemAlloc(64, &memory).ok());
  auto* data = static_cast<std::byte*>(memory);
  const std::vector<Pattern> patterns = {{{}, 0},
                                         {{0x7F}, 1},
                                         {{0xC0, 0x7F}, 2},
                                         {{0x00, 0x00, 0xC0, 0x7F}, 4},
                                         {{0, 0, 0, 0, 0, 0, 0xF8, 0x7F}, 8}};
  for (const Pattern& pattern : patterns) {
    const size_t width = std::max<size_t>(pattern.size, 1);
    for (size_t bytes = 0; bytes <= 48; bytes += width) {
      EXPECT_OK(space_->FillNow({{data, 64, {{0x11}, 1}}}, std::chrono::seconds(5)));
      EXPECT_OK(space_->FillNow({{data, bytes, pattern}}, std::chrono::seconds(5)));
      const std::vector<unsigned char> out = Read(data, 64);
      for (size_t i = 0; i < 64; ++i) {
        // Of eight bytes the upper half is repeated: a NaN too.
        const size_t at = pattern.size == 8 ? 4 + i % 4 : i % width;
        const unsigned char inside = pattern.size == 0 ? 0 : pattern.bytes[at];
        ASSERT_EQ(out[i], i < bytes ? inside : 0x11) << width << " " << bytes << " " << i;
      }
    }
  }
  EXPECT_OK(space_->gpu().MemFree(memory));
}

TEST_P(StreamSpaceTest, AHoldOfAnyStreamLetsTheCopyStreamsRun) {
  // More streams than there are hardware queues: some share one with a copy stream.
  const ScopedCurrent current(space_->gpu());
  std::unique_ptr<Copier> in;
  EXPECT_OK(space_->MakeCopier(Direction::kIn, 64, &in));
  std::unique_ptr<SlotMemory> slot;
  EXPECT_OK(space_->Allocate(64, &slot));
  void* memory = nullptr;
  EXPECT_OK(space_->gpu().MemAlloc(64, &memory));
  uint64_t submitted = 0;
  std::vector<Stream> streams(12);
  for (Stream& stream : streams) {
    EXPECT_OK(space_->gpu().StreamCreate(false, &stream));
    std::shared_ptr<Hold> hold;
    EXPECT_OK(space_->HoldQueue(stream, &hold));
    const CopyPiece piece{static_cast<std::byte*>(memory), slot->data(), 64};
    EXPECT_OK(in->Submit(&piece, 1, false));
    ++submitted;
    uint64_t ended = 0;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (ended < submitted && std::chrono::steady_clock::now() < deadline) {
      EXPECT_OK(in->Poll(&ended));
      std::this_thread::yield();
    }
    EXPECT_EQ(ended, submitted);
    bool done = true;
    EXPECT_OK(space_->gpu().StreamQuery(stream, &done));
    EXPECT_FALSE(done) << "the hold does not hold";
    hold->Release();
    EXPECT_OK(space_->gpu().StreamSynchronize(stream));
  }
  for (Stream stream : streams) EXPECT_OK(space_->gpu().StreamDestroy(stream));
  EXPECT_OK(space_->gpu().MemFree(memory));
}

TEST_P(StreamSpaceTest, ASlowDeviceIsNotTakenForASharedQueue) {
  const ScopedCurrent current(space_->gpu());
  Stream stream = nullptr;
  EXPECT_OK(space_->gpu().StreamCreate(false, &stream));
  std::shared_ptr<Hold> hold;
  EXPECT_OK(space_->HoldQueue(stream, &hold));  // now the copy streams have queues of their own
  hold->Release();
  Stream other = nullptr;
  EXPECT_OK(space_->gpu().StreamCreate(false, &other));
  const bool cuda = GetParam() == Vendor::kCuda;
  const char* const mark = cuda ? "cuStreamWriteValue32_v2" : "hipStreamWriteValue32";
  const char* const create = cuda ? "cuStreamCreateWithPriority" : "hipStreamCreateWithPriority";
  control_.Delay(mark, 30000);
  control_.ClearCalls();
  EXPECT_OK(space_->HoldQueue(other, &hold));
  control_.Delay(mark, 0);
  // Whether they share a queue is the twin's dealing: at most one replacement for each, not forty.
  EXPECT_LE(control_.Calls(create), 2);
  hold->Release();
  for (Stream one : {stream, other}) {
    EXPECT_OK(space_->gpu().StreamSynchronize(one));
    EXPECT_OK(space_->gpu().StreamDestroy(one));
  }
}

TEST_P(StreamSpaceTest, CountsMemory) {
  const SpaceStats before = space_->Stats();
  std::vector<std::byte> foreign(3 * 4096);
  const auto address = reinterpret_cast<uintptr_t>(foreign.data());
  void* page = reinterpret_cast<void*>((address + 4095) / 4096 * 4096);
  {
    std::unique_ptr<SlotMemory> own, registered;
    EXPECT_OK(space_->Allocate(12345, &own));
    EXPECT_OK(space_->Register(page, 4096, &registered));
    const SpaceStats now = space_->Stats();
    EXPECT_EQ(now.at("pinned_bytes"), before.at("pinned_bytes") + 12345);
    EXPECT_EQ(now.at("registered_bytes"), before.at("registered_bytes") + 4096);
    EXPECT_EQ(now.at("allocations"), before.at("allocations") + 2);
  }
  const SpaceStats after = space_->Stats();
  EXPECT_EQ(after.at("pinned_bytes"), before.at("pinned_bytes"));
  EXPECT_EQ(after.at("registered_bytes"), before.at("registered_bytes"));
}

TEST_P(StreamSpaceTest, OrdersRemoteWritesWhereTheHardwareDoesNot) {
  const bool needed = space_->orders_remote_writes();
  const Capabilities& can = space_->gpu().capabilities();
  EXPECT_EQ(needed,
            can.gpu_direct_rdma && can.host_flush && can.writes_ordering == WritesOrdering::kNone);
  control_.ClearCalls();
  EXPECT_OK(space_->OrderRemoteWrites());
  if (GetParam() == Vendor::kCuda) {
    EXPECT_EQ(control_.Calls("cuFlushGPUDirectRDMAWrites"), needed ? 1 : 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Twin, StreamSpaceTest, ::testing::Values(Vendor::kCuda, Vendor::kHip),
                         [](const auto& info) { return std::string(PlatformName(info.param)); });

}  // namespace
}  // namespace hetccl::device
