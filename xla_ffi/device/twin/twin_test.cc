// The test twin behaves as the vendors' documents say, where other tests rely on it.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <vector>

#include "xla_ffi/device/twin/on_twin.h"

namespace hetccl::twin {
namespace {

using device::Compare;
using device::Event;
using device::Signal;
using device::Stream;

class TwinTest : public OnTwin {};
INSTANTIATE_ON_TWIN(TwinTest);

constexpr size_t kBytes = 64 << 10;

TEST_P(TwinTest, StreamsRunInOrderAndBesideEachOther) {
  const Stream held = NewStream();
  const Stream free = NewStream();
  const Signal signal = NewSignal();
  void* device = nullptr;
  ASSERT_OK(gpu->MemAlloc(kBytes, &device));
  ASSERT_OK(gpu->StreamWaitValue32(held, signal.device, 1, Compare::kEqual));
  ASSERT_OK(gpu->MemsetD8Async(device, 7, kBytes, held));
  ASSERT_OK(gpu->MemsetD8Async(device, 3, kBytes, free));
  ASSERT_OK(gpu->StreamSynchronize(free));
  EXPECT_FALSE(Done(held));
  Set(signal, 1);
  ASSERT_OK(gpu->StreamSynchronize(held));
  std::vector<unsigned char> host(kBytes);
  ASSERT_OK(gpu->MemcpyDtoHAsync(host.data(), device, kBytes, held));
  EXPECT_EQ(host, std::vector<unsigned char>(kBytes, 7));
}

TEST_P(TwinTest, WaitingStreamHoldsUpThoseOfItsHardwareQueue) {
  control.Set("queues", 2);
  control.Reset();
  const Signal signal = NewSignal();
  const Stream waiting = NewStream();
  const Stream other_queue = NewStream();
  const Stream same_queue = NewStream();
  const Signal marks[] = {NewSignal(), NewSignal()};
  ASSERT_OK(gpu->StreamWaitValue32(waiting, signal.device, 1, Compare::kAtLeast));
  ASSERT_OK(gpu->StreamWriteValue32(same_queue, marks[0].device, 1));
  ASSERT_OK(gpu->StreamWriteValue32(other_queue, marks[1].device, 1));
  EXPECT_TRUE(Eventually([&] { return Get(marks[1]) == 1; }));
  Wait();
  EXPECT_EQ(Get(marks[0]), 0u) << "went past a stream that waits in the same hardware queue";
  Set(signal, 1);
  EXPECT_TRUE(Eventually([&] { return Get(marks[0]) == 1; }));
  control.Set("queues", 8);
}

TEST_P(TwinTest, OneThreadRunsAllHostFunctions) {
  struct Shared {
    std::atomic<int> running{0};
    std::atomic<int> most{0};
    std::atomic<int> calls{0};
  } shared;
  const auto function = [](void* data) {
    auto& s = *static_cast<Shared*>(data);
    const int now = ++s.running;
    if (now > s.most) s.most = now;
    std::this_thread::sleep_for(Seconds(0.002));
    --s.running;
    ++s.calls;
  };
  std::vector<Stream> streams;
  for (int i = 0; i < 4; ++i) streams.push_back(NewStream());
  for (int i = 0; i < 12; ++i) {
    ASSERT_OK(gpu->LaunchHostFunc(streams[static_cast<size_t>(i) % 4], function, &shared));
  }
  for (Stream stream : streams) ASSERT_OK(gpu->StreamSynchronize(stream));
  EXPECT_EQ(shared.calls, 12);
  EXPECT_EQ(shared.most, 1);
}

TEST_P(TwinTest, HostFunctionsMayNotCallTheDriver) {
  struct Call {
    const device::Gpu* gpu;
    Status status;
  } call{gpu, Status()};
  const Stream stream = NewStream();
  ASSERT_OK(gpu->LaunchHostFunc(
      stream,
      [](void* data) {
        auto& c = *static_cast<Call*>(data);
        bool done = false;
        c.status = c.gpu->StreamQuery(nullptr, &done);
      },
      &call));
  ASSERT_OK(gpu->StreamSynchronize(stream));
  ASSERT_FALSE(call.status.ok());
  EXPECT_NE(call.status.message().find(Name("NOT_PERMITTED", "NotPermitted")), std::string::npos);
}

TEST_P(TwinTest, CopiesOfUnregisteredMemoryAreSynchronous) {
  const Stream stream = NewStream();
  void* device = nullptr;
  ASSERT_OK(gpu->MemAlloc(kBytes, &device));
  control.Delay(Name("cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync"), 20000);
  std::vector<char> pageable(kBytes, 1);
  ASSERT_OK(gpu->MemcpyHtoDAsync(device, pageable.data(), kBytes, stream));
  EXPECT_TRUE(Done(stream));
  void* pinned = nullptr;
  ASSERT_OK(gpu->MemHostAlloc(kBytes, &pinned));
  ASSERT_OK(gpu->MemcpyHtoDAsync(device, pinned, kBytes, stream));
  EXPECT_FALSE(Done(stream));
  ASSERT_OK(gpu->StreamSynchronize(stream));
}

TEST_P(TwinTest, CopiesStayInsideWhatTheDriverKnows) {
  const Stream stream = NewStream();
  void* device = nullptr;
  ASSERT_OK(gpu->MemAlloc(kBytes, &device));
  std::vector<char> host(2 * kBytes);
  char* inside = static_cast<char*>(device);
  EXPECT_FALSE(gpu->MemcpyDtoHAsync(host.data(), inside + 1, kBytes, stream).ok());
  EXPECT_FALSE(gpu->MemcpyDtoHAsync(host.data(), host.data() + kBytes, 8, stream).ok());
  EXPECT_FALSE(gpu->MemsetD8Async(inside + 8, 0, kBytes, stream).ok());
  ASSERT_OK(gpu->MemHostRegister(host.data(), kBytes));
  // Half registered, half not.
  EXPECT_FALSE(gpu->MemcpyDtoHAsync(host.data() + 8, device, kBytes, stream).ok());
  ASSERT_OK(gpu->MemcpyDtoHAsync(host.data(), device, kBytes, stream));
  ASSERT_OK(gpu->MemHostUnregister(host.data()));
}

TEST_P(TwinTest, AddressesAreOfTheirSide) {
  std::vector<char> host(kBytes);
  ASSERT_OK(gpu->MemHostRegister(host.data(), kBytes));
  EXPECT_FALSE(gpu->MemHostRegister(host.data() + 8, 8).ok()) << "registered twice";
  void* device = nullptr;
  ASSERT_OK(gpu->MemHostGetDevicePointer(host.data() + 64, &device));
  EXPECT_NE(device, host.data() + 64) << "same_addresses is 0";
  const Stream stream = NewStream();
  ASSERT_OK(gpu->StreamWriteValue32(stream, device, 5));
  ASSERT_OK(gpu->StreamSynchronize(stream));
  EXPECT_EQ(host[64], 5);
  EXPECT_FALSE(gpu->StreamWriteValue32(stream, host.data() + 64, 5).ok());
  ASSERT_OK(gpu->MemHostUnregister(host.data()));
  EXPECT_FALSE(gpu->MemHostUnregister(host.data()).ok());
  EXPECT_FALSE(gpu->MemHostGetDevicePointer(host.data(), &device).ok());
}

TEST_P(TwinTest, WaitsTakeWhatTheVendorDocuments) {
  const Stream stream = NewStream();
  uint32_t unknown = 1;
  EXPECT_FALSE(gpu->StreamWaitValue32(stream, &unknown, 1, Compare::kEqual).ok());
  EXPECT_FALSE(gpu->StreamWriteValue32(stream, &unknown, 1).ok());
  void* pinned = nullptr;
  void* address = nullptr;
  ASSERT_OK(gpu->MemHostAlloc(kBytes, &pinned));
  ASSERT_OK(gpu->MemHostGetDevicePointer(pinned, &address));
  ASSERT_OK(gpu->StreamWriteValue32(stream, address, 1));
  const Status waited = gpu->StreamWaitValue32(stream, address, 1, Compare::kEqual);
  EXPECT_EQ(waited.ok(), cuda()) << "HIP waits take signal memory only";
  EXPECT_EQ(gpu->capabilities().waits_on_registered_memory, cuda());
  const Signal signal = NewSignal();
  char* odd = static_cast<char*>(signal.device) + 2;
  EXPECT_FALSE(gpu->StreamWriteValue32(stream, odd, 1).ok());
  ASSERT_OK(gpu->StreamSynchronize(stream));
}

TEST_P(TwinTest, AtLeastIsCyclicUnderCudaOnly) {
  const Stream stream = NewStream();
  const Signal signal = NewSignal();
  Set(signal, 3);
  ASSERT_OK(gpu->StreamWaitValue32(stream, signal.device, 0xFFFFFFF0, Compare::kAtLeast));
  Wait();
  EXPECT_EQ(Done(stream), cuda());
  Set(signal, 0xFFFFFFF0);
  ASSERT_OK(gpu->StreamSynchronize(stream));
}

TEST_P(TwinTest, DestroyedHandlesAreErrors) {
  const Stream stream = NewStream();
  const Event event = NewEvent();
  ASSERT_OK(gpu->EventRecord(event, stream));
  ASSERT_OK(gpu->StreamDestroy(stream));
  bool done = false;
  EXPECT_FALSE(gpu->StreamQuery(stream, &done).ok());
  EXPECT_FALSE(gpu->StreamDestroy(stream).ok());
  EXPECT_FALSE(gpu->EventRecord(event, stream).ok());
}

TEST_P(TwinTest, DestroyedStreamStillRunsWhatIsQueued) {
  const Signal signal = NewSignal();
  const Signal mark = NewSignal();
  const Stream stream = NewStream();
  ASSERT_OK(gpu->StreamWaitValue32(stream, signal.device, 1, Compare::kEqual));
  ASSERT_OK(gpu->StreamWriteValue32(stream, mark.device, 9));
  ASSERT_OK(gpu->StreamDestroy(stream));
  EXPECT_EQ(control.Live("streams"), 0);
  EXPECT_EQ(Get(mark), 0u);
  Set(signal, 1);
  EXPECT_TRUE(Eventually([&] { return Get(mark) == 9; }));
}

TEST_P(TwinTest, EventsTakeTheRecordingOfTheirTime) {
  const Signal signal = NewSignal();
  const Stream first = NewStream();
  const Stream second = NewStream();
  const Event event = NewEvent();
  bool done = false;
  ASSERT_OK(gpu->EventQuery(event, &done));
  EXPECT_TRUE(done) << "never recorded";
  ASSERT_OK(gpu->StreamWaitValue32(first, signal.device, 1, Compare::kEqual));
  ASSERT_OK(gpu->EventRecord(event, first));
  ASSERT_OK(gpu->EventQuery(event, &done));
  EXPECT_FALSE(done);
  ASSERT_OK(gpu->EventRecord(event, second));  // the latest recording counts
  ASSERT_OK(gpu->StreamSynchronize(second));
  ASSERT_OK(gpu->EventQuery(event, &done));
  EXPECT_TRUE(done);
  Set(signal, 1);
  ASSERT_OK(gpu->StreamSynchronize(first));
}

TEST_P(TwinTest, FreeingWaitsForTheDevice) {
  const Signal signal = NewSignal();
  const Stream stream = NewStream();
  void* device = nullptr;
  ASSERT_OK(gpu->MemAlloc(kBytes, &device));
  ASSERT_OK(gpu->StreamWaitValue32(stream, signal.device, 1, Compare::kEqual));
  std::atomic<bool> freed{false};
  std::thread freeing([&] {
    EXPECT_TRUE(gpu->MakeCurrent().ok());
    EXPECT_TRUE(gpu->MemFree(device).ok());
    freed = true;
  });
  Wait();
  EXPECT_FALSE(freed);
  Set(signal, 1);
  freeing.join();
  EXPECT_EQ(control.Live("device_bytes"), 0);
}

TEST_P(TwinTest, LostDeviceStaysLostAndReleasesWhatWaits) {
  const Signal never = NewSignal();
  const Stream waiting = NewStream();
  const Stream failing = NewStream();
  ASSERT_OK(gpu->StreamWaitValue32(waiting, never.device, 1, Compare::kEqual));
  control.FailWhenRun(Name("cuStreamWriteValue32_v2", "hipStreamWriteValue32"), 1, 700);
  ASSERT_OK(gpu->StreamWriteValue32(failing, never.device, 0));
  EXPECT_FALSE(gpu->StreamSynchronize(waiting).ok());
  const Status later = gpu->StreamWriteValue32(failing, never.device, 1);
  ASSERT_FALSE(later.ok());
  EXPECT_NE(later.message().find(Name("CUDA_ERROR_ILLEGAL_ADDRESS", "hipErrorIllegalAddress")),
            std::string::npos);
  const device::Gpu* other = nullptr;
  ASSERT_OK(driver->Open(1, &other));
  ASSERT_OK(other->MakeCurrent());
  Stream stream = nullptr;
  EXPECT_TRUE(other->StreamCreate(true, &stream).ok()) << "another device is not concerned";
}

TEST_P(TwinTest, ExportedMemoryIsTheSameMemory) {
  void* device = nullptr;
  ASSERT_OK(gpu->MemAlloc(kBytes, &device));
  int descriptor = -1;
  uint64_t offset = 1;
  ASSERT_OK(gpu->ExportDmaBuf(device, kBytes, &descriptor, &offset));
  EXPECT_EQ(offset, 0u);
  void* seen = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  ::close(descriptor);
  ASSERT_NE(seen, MAP_FAILED);
  const Stream stream = NewStream();
  ASSERT_OK(gpu->MemsetD32Async(device, 0x01020304, kBytes / 4, stream));
  ASSERT_OK(gpu->StreamSynchronize(stream));
  EXPECT_EQ(static_cast<uint32_t*>(seen)[kBytes / 4 - 1], 0x01020304u);
  ::munmap(seen, kBytes);
  EXPECT_FALSE(gpu->ExportDmaBuf(device, kBytes - 1, &descriptor, &offset).ok());
  control.SetAttribute(cuda() ? 124 : 93, 0);
  EXPECT_FALSE(gpu->ExportDmaBuf(device, kBytes, &descriptor, &offset).ok());
  control.SetAttribute(cuda() ? 124 : 93, 1);
}

TEST_P(TwinTest, FailuresDelaysAndCountsAreAsAsked) {
  const char* const call = Name("cuEventCreate", "hipEventCreateWithFlags");
  control.Fail(call, 2, 2);
  Event event = nullptr;
  EXPECT_TRUE(gpu->EventCreate(&event).ok());
  EXPECT_FALSE(gpu->EventCreate(&event).ok());
  EXPECT_TRUE(gpu->EventCreate(&event).ok());
  EXPECT_EQ(control.Calls(call), 3);
  EXPECT_EQ(control.Live("events"), 2);
  control.Delay(Name("cuStreamWriteValue32_v2", "hipStreamWriteValue32"), 20000);
  const Stream stream = NewStream();
  const Signal mark = NewSignal();
  const TimePoint begin = Clock::now();
  ASSERT_OK(gpu->StreamWriteValue32(stream, mark.device, 1));
  ASSERT_OK(gpu->StreamSynchronize(stream));
  EXPECT_GE(Clock::now() - begin, Seconds(0.02));
}

// Two "processes" that pass a payload through one shared pinned slot by flags alone, under jitter:
// what ThreadSanitizer has to accept, and the flags have to order.
TEST_P(TwinTest, FlagsOrderCopiesBetweenStreams) {
  control.Set("jitter_us", 200);
  constexpr uint32_t kRounds = 30;
  void* from = nullptr;
  void* to = nullptr;
  void* slot = nullptr;
  ASSERT_OK(gpu->MemAlloc(kRounds * 4, &from));
  ASSERT_OK(gpu->MemAlloc(kRounds * 4, &to));
  ASSERT_OK(gpu->MemHostAlloc(4, &slot));
  const Signal filled = NewSignal();
  const Signal freed = NewSignal();
  const Stream out = NewStream();
  const Stream in = NewStream();
  for (uint32_t i = 0; i < kRounds; ++i) {
    char* source = static_cast<char*>(from) + i * 4;
    ASSERT_OK(gpu->MemsetD32Async(source, i + 100, 1, out));
    ASSERT_OK(gpu->StreamWaitValue32(out, freed.device, i, Compare::kAtLeast));
    ASSERT_OK(gpu->MemcpyDtoHAsync(slot, source, 4, out));
    ASSERT_OK(gpu->StreamWriteValue32(out, filled.device, i + 1));
    ASSERT_OK(gpu->StreamWaitValue32(in, filled.device, i + 1, Compare::kAtLeast));
    ASSERT_OK(gpu->MemcpyHtoDAsync(static_cast<char*>(to) + i * 4, slot, 4, in));
    ASSERT_OK(gpu->StreamWriteValue32(in, freed.device, i + 1));
  }
  std::vector<uint32_t> result(kRounds);
  ASSERT_OK(gpu->StreamSynchronize(in));
  ASSERT_OK(gpu->MemcpyDtoHAsync(result.data(), to, kRounds * 4, in));
  for (uint32_t i = 0; i < kRounds; ++i) ASSERT_EQ(result[i], i + 100);
}

// The streams' own locks must not hide that nothing orders the host behind them (lane.h).
TEST_P(TwinTest, ThreadSanitizerSeesAHostThatDoesNotWait) {
#if !defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "without ThreadSanitizer";
#else
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  void* device = nullptr;
  void* pinned = nullptr;
  ASSERT_OK(gpu->MemAlloc(kBytes, &device));
  ASSERT_OK(gpu->MemHostAlloc(kBytes, &pinned));
  const Stream stream = NewStream();
  const auto copy_and_write = [&] {
    control.Delay(Name("cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync"), 10000);
    (void)gpu->MemcpyHtoDAsync(device, pinned, kBytes, stream);
    static_cast<char*>(pinned)[100] = 1;
    (void)gpu->StreamSynchronize(stream);
  };
  const auto copy_and_read = [&] {
    (void)gpu->MemcpyDtoHAsync(pinned, device, kBytes, stream);
    Wait();
    (void)gpu->MemHostGetDevicePointer(pinned, &device);  // takes locks, but waits for nothing
    if (static_cast<char*>(pinned)[100] != 0) std::printf("never\n");
  };
  EXPECT_DEATH(copy_and_write(), "data race");
  EXPECT_DEATH(copy_and_read(), "data race");
#endif
}

}  // namespace
}  // namespace hetccl::twin
