// What one device does, through the table, under the names of both vendors.
#include "xla_ffi/device/driver/gpu.h"

#include <dlfcn.h>

#include <numeric>
#include <vector>

#include "xla_ffi/device/twin/on_twin.h"

namespace hetccl::device {
namespace {

class GpuTest : public twin::OnTwin {};
INSTANTIATE_ON_TWIN(GpuTest);

TEST_P(GpuTest, DescribesItself) {
  EXPECT_EQ(gpu->ordinal(), 0);
  EXPECT_EQ(gpu->name(), cuda() ? "test twin of a CUDA device" : "test twin of a HIP device");
  EXPECT_EQ(gpu->pci_bus_id(), "0000:10:00.0");
  EXPECT_EQ(&gpu->driver(), driver);
  const Capabilities& can = gpu->capabilities();
  EXPECT_TRUE(can.stream_memory_operations && can.host_functions && can.dma_buf &&
              can.gpu_direct_rdma);
  EXPECT_FALSE(can.wait_flushes_remote_writes);
  EXPECT_FALSE(can.same_host_addresses);
  EXPECT_EQ(can.host_flush, cuda());
  EXPECT_EQ(can.writes_ordering, cuda() ? WritesOrdering::kOwner : WritesOrdering::kNone);
  EXPECT_EQ(can.host_numa_node, cuda() ? 0 : -1) << "HIP: an attribute newer than this driver";
}

TEST_P(GpuTest, ErrorsNameCallDeviceAndTheDriversOwnWords) {
  const char* const call = Name("cuEventRecord", "hipEventRecord");
  control.Fail(call, 1, 719);
  const Status status = gpu->EventRecord(NewEvent(), NewStream());
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.message(), std::string(call) + " failed on " + (cuda() ? "CUDA" : "ROCm") +
                                  " device 0 (" + gpu->name() + ", 0000:10:00.0): " +
                                  Name("CUDA_ERROR_LAUNCH_FAILED", "hipErrorLaunchFailure") +
                                  ": unspecified launch failure");
  EXPECT_FALSE(gpu->EventRecord(nullptr, nullptr).ok()) << "the device is lost";
}

// HIP hands an error out again to whoever asks for the thread's last one, XLA for example.
TEST_P(GpuTest, NothingIsLeftBehindForTheNextToAsk) {
  if (cuda()) GTEST_SKIP() << "CUDA's driver keeps no last error";
  void* library = ::dlopen(twin::Library(GetParam()).c_str(), RTLD_NOW);
  auto* last = reinterpret_cast<int (*)()>(::dlsym(library, "hipGetLastError"));
  ASSERT_NE(last, nullptr);
  bool done = false;
  EXPECT_FALSE(gpu->StreamDestroy(reinterpret_cast<Stream>(uintptr_t{16})).ok());
  EXPECT_EQ(last(), 0);
  const Signal signal = NewSignal();
  const Stream stream = NewStream();
  ASSERT_OK(gpu->StreamWaitValue32(stream, signal.device, 1, Compare::kEqual));
  ASSERT_OK(gpu->StreamQuery(stream, &done));
  EXPECT_FALSE(done);
  EXPECT_EQ(last(), 0);
  Set(signal, 1);
  ASSERT_OK(gpu->StreamSynchronize(stream));
}

TEST_P(GpuTest, CurrentDeviceIsTheThreadsOwnAndComesBack) {
  const Gpu* other = nullptr;
  const Gpu* current = nullptr;
  ASSERT_OK(driver->Open(1, &other));
  {
    const ScopedCurrent scoped(*other);
    ASSERT_OK(scoped.status());
    ASSERT_OK(driver->OpenCurrent(&current));
    EXPECT_EQ(current, other);
  }
  ASSERT_OK(driver->OpenCurrent(&current));
  EXPECT_EQ(current, gpu);
  std::thread([&] {
    const Gpu* here = nullptr;
    // A new thread has no context under CUDA, and device 0 under HIP.
    EXPECT_EQ(driver->OpenCurrent(&here).ok(), !cuda());
    EXPECT_TRUE(other->MakeCurrent().ok());
    EXPECT_TRUE(driver->OpenCurrent(&here).ok());
    EXPECT_EQ(here, other);
  }).join();
}

TEST_P(GpuTest, CopiesAndFills) {
  constexpr size_t kWords = 1000;
  std::vector<uint32_t> host(kWords);
  std::iota(host.begin(), host.end(), 5u);
  const std::vector<uint32_t> expected = host;
  void* first = nullptr;
  void* second = nullptr;
  ASSERT_OK(gpu->MemAlloc(kWords * 4, &first));
  ASSERT_OK(gpu->MemAlloc(kWords * 4, &second));
  ASSERT_OK(gpu->MemHostRegister(host.data(), kWords * 4));
  const Stream stream = NewStream();
  ASSERT_OK(gpu->MemcpyHtoDAsync(first, host.data(), kWords * 4, stream));
  ASSERT_OK(gpu->MemcpyDtoDAsync(second, first, kWords * 4, stream));
  ASSERT_OK(gpu->MemsetD32Async(first, 0xABCDEF01, kWords, stream));
  ASSERT_OK(gpu->StreamSynchronize(stream));
  host.assign(kWords, 0);
  ASSERT_OK(gpu->MemcpyDtoHAsync(host.data(), second, kWords * 4, stream));
  ASSERT_OK(gpu->StreamSynchronize(stream));
  EXPECT_EQ(host, expected);
  ASSERT_OK(gpu->MemcpyDtoHAsync(host.data(), first, kWords * 4, stream));
  ASSERT_OK(gpu->StreamSynchronize(stream));
  EXPECT_EQ(host, std::vector<uint32_t>(kWords, 0xABCDEF01));
  ASSERT_OK(gpu->MemHostUnregister(host.data()));
}

TEST_P(GpuTest, FreesWhatItAllocates) {
  void* device = nullptr;
  void* host = nullptr;
  ASSERT_OK(gpu->MemAlloc(16, &device));
  ASSERT_OK(gpu->MemHostAlloc(16, &host));
  EXPECT_EQ(Get(NewSignal()), 0u);
  EXPECT_FALSE(gpu->MemFree(host).ok()) << "of the other kind";
  ASSERT_OK(gpu->MemFree(device));
  ASSERT_OK(gpu->MemFreeHost(host));
  const Stream stream = NewStream();
  ASSERT_OK(gpu->StreamDestroy(stream));
  EXPECT_EQ(control.Live("device_bytes"), 0);
  EXPECT_EQ(control.Live("host_bytes"), cuda() ? 8 : 0) << "CUDA's signal is host memory";
  EXPECT_EQ(control.Live("streams"), 0);
}

TEST_P(GpuTest, WaitsForEqualAndForAtLeast) {
  const Signal signal = NewSignal();
  const Stream stream = NewStream();
  Set(signal, 5);
  ASSERT_OK(gpu->StreamWaitValue32(stream, signal.device, 4, Compare::kAtLeast));
  ASSERT_OK(gpu->StreamSynchronize(stream));
  ASSERT_OK(gpu->StreamWaitValue32(stream, signal.device, 4, Compare::kEqual));
  Wait();
  EXPECT_FALSE(Done(stream));
  Set(signal, 4);
  ASSERT_OK(gpu->StreamSynchronize(stream));
}

TEST_P(GpuTest, FlushesAreAskedForOnlyWhereThereAreAny) {
  EXPECT_EQ(gpu->FlushRemoteWrites().ok(), gpu->capabilities().host_flush);
  const Signal signal = NewSignal();
  const Stream stream = NewStream();
  Set(signal, 1);
  EXPECT_FALSE(gpu->StreamWaitValue32(stream, signal.device, 1, Compare::kEqual, true).ok());
  if (!cuda()) return;
  control.SetAttribute(98, 1);  // CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
  ASSERT_OK(gpu->StreamWaitValue32(stream, signal.device, 1, Compare::kEqual, true));
  ASSERT_OK(gpu->StreamSynchronize(stream));
  control.SetAttribute(98, 0);
}

TEST_P(GpuTest, HostFunctionsRunInStreamOrder) {
  std::vector<int> order;
  struct Item {
    std::vector<int>* order;
    int number;
  } items[] = {{&order, 0}, {&order, 1}, {&order, 2}};
  const Stream stream = NewStream();
  for (Item& item : items) {
    ASSERT_OK(gpu->LaunchHostFunc(
        stream,
        [](void* data) {
          auto* i = static_cast<Item*>(data);
          i->order->push_back(i->number);
        },
        &item));
  }
  ASSERT_OK(gpu->StreamSynchronize(stream));
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
}

}  // namespace
}  // namespace hetccl::device
