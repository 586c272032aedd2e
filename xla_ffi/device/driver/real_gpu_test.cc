// Every call of the table on a real GPU, where the machine has one: that the names, signatures and
// numbers written down in table.cc and abi.h are the drivers'. Skipped without a GPU.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/common/test_status.h"
#include "xla_ffi/device/driver/gpu.h"

namespace hetccl::device {
namespace {

constexpr size_t kWords = 1 << 16;
constexpr size_t kBytes = kWords * 4;

class RealGpuTest : public testing::TestWithParam<Vendor> {
 protected:
  void SetUp() override {
    const Driver* driver = nullptr;
    Status status = Driver::Get(GetParam(), "", &driver);
    if (status.ok()) status = driver->Open(0, &gpu);
    if (!status.ok()) GTEST_SKIP() << status.message();
    ASSERT_OK(gpu->MakeCurrent());
    ASSERT_OK(gpu->StreamCreate(true, &stream));
    ASSERT_OK(gpu->MemAlloc(kBytes, &device));
    const int descriptor = ::memfd_create("test", 0);
    ASSERT_EQ(::ftruncate(descriptor, kBytes), 0);
    void* mapped = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    ::close(descriptor);
    ASSERT_NE(mapped, MAP_FAILED);
    host = static_cast<uint32_t*>(mapped);
    ASSERT_OK(gpu->MemHostRegister(host, kBytes));
  }
  void TearDown() override {
    if (gpu == nullptr || host == nullptr) return;
    EXPECT_TRUE(gpu->StreamSynchronize(stream).ok());
    EXPECT_TRUE(gpu->StreamDestroy(stream).ok());
    EXPECT_TRUE(gpu->MemHostUnregister(host).ok());
    EXPECT_TRUE(gpu->MemFree(device).ok());
    ::munmap(host, kBytes);
  }
  bool Done() const {
    bool done = false;
    EXPECT_TRUE(gpu->StreamQuery(stream, &done).ok());
    return done;
  }

  const Gpu* gpu = nullptr;
  Stream stream = nullptr;
  void* device = nullptr;
  uint32_t* host = nullptr;
};
INSTANTIATE_TEST_SUITE_P(Real, RealGpuTest, testing::Values(Vendor::kCuda, Vendor::kHip),
                         [](const auto& vendor) { return PlatformName(vendor.param); });

TEST_P(RealGpuTest, DescribesItself) {
  EXPECT_FALSE(gpu->name().empty());
  EXPECT_EQ(gpu->pci_bus_id().size(), 12u) << gpu->pci_bus_id();
  const Gpu* current = nullptr;
  ASSERT_OK(gpu->driver().OpenCurrent(&current));
  EXPECT_EQ(current, gpu);
  const ScopedCurrent scoped(*gpu);
  ASSERT_OK(scoped.status());
  const Capabilities& can = gpu->capabilities();
  std::printf(
      "%s %s driver %d: memory operations %d, on registered memory %d, wait flush %d, "
      "host functions %d, same addresses %d, dma-buf %d, GPUDirect %d, ordering %d, host flush %d, "
      "NUMA node %d, missing: %s\n",
      gpu->name().c_str(), gpu->pci_bus_id().c_str(), gpu->driver().version(),
      can.stream_memory_operations, can.waits_on_registered_memory, can.wait_flushes_remote_writes,
      can.host_functions, can.same_host_addresses, can.dma_buf, can.gpu_direct_rdma,
      static_cast<int>(can.writes_ordering), can.host_flush, can.host_numa_node,
      can.missing.c_str());
}

TEST_P(RealGpuTest, CopiesAndFills) {
  void* second = nullptr;
  ASSERT_OK(gpu->MemAlloc(kBytes, &second));
  std::iota(host, host + kWords, 5u);
  ASSERT_OK(gpu->MemcpyHtoDAsync(device, host, kBytes, stream));
  ASSERT_OK(gpu->MemcpyDtoDAsync(second, device, kBytes, stream));
  ASSERT_OK(gpu->MemsetD32Async(device, 0xABCDEF01, kWords / 2, stream));
  ASSERT_OK(gpu->MemsetD8Async(static_cast<char*>(device) + kBytes / 2, 7, kBytes / 2, stream));
  ASSERT_OK(gpu->StreamSynchronize(stream));
  std::fill_n(host, kWords, 0u);
  ASSERT_OK(gpu->MemcpyDtoHAsync(host, second, kBytes, stream));
  ASSERT_OK(gpu->StreamSynchronize(stream));
  for (uint32_t i = 0; i < kWords; ++i) ASSERT_EQ(host[i], i + 5);
  std::vector<uint32_t> pageable(kWords);
  ASSERT_OK(gpu->MemcpyDtoHAsync(pageable.data(), device, kBytes, stream));
  EXPECT_EQ(pageable[0], 0xABCDEF01u);
  EXPECT_EQ(pageable[kWords - 1], 0x07070707u);
  ASSERT_OK(gpu->MemFree(second));
}

TEST_P(RealGpuTest, EventsAndHostFunctions) {
  if (!gpu->capabilities().host_functions) GTEST_SKIP() << gpu->capabilities().missing;
  Event event = nullptr;
  ASSERT_OK(gpu->EventCreate(&event));
  std::atomic<bool> release{false};
  ASSERT_OK(gpu->LaunchHostFunc(
      stream,
      [](void* data) {
        while (!static_cast<std::atomic<bool>*>(data)->load()) std::this_thread::yield();
      },
      &release));
  ASSERT_OK(gpu->EventRecord(event, stream));
  bool done = true;
  ASSERT_OK(gpu->EventQuery(event, &done));
  EXPECT_FALSE(done);
  EXPECT_FALSE(Done());
  release = true;
  ASSERT_OK(gpu->StreamSynchronize(stream));
  ASSERT_OK(gpu->EventQuery(event, &done));
  EXPECT_TRUE(done);
}

TEST_P(RealGpuTest, MemoryOperations) {
  const Capabilities& can = gpu->capabilities();
  if (!can.stream_memory_operations) GTEST_SKIP() << "no stream memory operations";
  Signal signal;
  ASSERT_OK(gpu->SignalAlloc(&signal));
  void* address = nullptr;
  ASSERT_OK(gpu->MemHostGetDevicePointer(host, &address));
  host[0] = host[1] = 0;
  const auto word = [&](size_t i) { return __atomic_load_n(host + i, __ATOMIC_ACQUIRE); };
  void* second_address = static_cast<char*>(address) + 4;
  ASSERT_OK(gpu->StreamWaitValue32(stream, signal.device, 3, Compare::kAtLeast));
  ASSERT_OK(gpu->StreamWriteValue32(stream, address, 8));
  ASSERT_OK(gpu->StreamWaitValue32(stream, signal.device, 5, Compare::kEqual));
  ASSERT_OK(gpu->StreamWriteValue32(stream, second_address, 9));
  std::this_thread::sleep_for(Seconds(0.02));
  EXPECT_FALSE(Done());
  EXPECT_EQ(word(0), 0u);
  __atomic_store_n(signal.host, 4, __ATOMIC_RELEASE);
  const TimePoint end = Clock::now() + Seconds(10);
  while (word(0) != 8 && Clock::now() < end) std::this_thread::yield();
  EXPECT_EQ(word(0), 8u);
  EXPECT_EQ(word(1), 0u);
  __atomic_store_n(signal.host, 5, __ATOMIC_RELEASE);
  ASSERT_OK(gpu->StreamSynchronize(stream));
  EXPECT_EQ(word(1), 9u);
  uint32_t unknown = 0;
  EXPECT_FALSE(gpu->StreamWriteValue32(stream, &unknown, 1).ok());
  EXPECT_FALSE(gpu->StreamWaitValue32(stream, &unknown, 0, Compare::kAtLeast).ok());
  const Status registered = gpu->StreamWaitValue32(stream, address, 8, Compare::kEqual);
  EXPECT_EQ(registered.ok(), can.waits_on_registered_memory) << registered.message();
  ASSERT_OK(gpu->StreamSynchronize(stream));
}

TEST_P(RealGpuTest, GpuDirect) {
  const Capabilities& can = gpu->capabilities();
  const Status flushed = gpu->FlushRemoteWrites();
  EXPECT_EQ(flushed.ok(), can.host_flush) << flushed.message();
  if (!can.dma_buf) GTEST_SKIP() << "no dma-buf";
  constexpr size_t kWhole = 2 << 20;
  void* memory = nullptr;
  ASSERT_OK(gpu->MemAlloc(kWhole, &memory));
  int descriptor = -1;
  uint64_t offset = 0;
  ASSERT_OK(gpu->ExportDmaBuf(memory, kWhole, &descriptor, &offset));
  EXPECT_GE(descriptor, 0);
  ::close(descriptor);
  ASSERT_OK(gpu->MemFree(memory));
}

}  // namespace
}  // namespace hetccl::device
