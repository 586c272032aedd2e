// Finding and loading drivers: every way to fail is one clear error.
#include "xla_ffi/device/driver/driver.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "xla_ffi/device/driver/gpu.h"
#include "xla_ffi/device/twin/control.h"
#include "xla_ffi/device/twin/on_twin.h"

namespace hetccl::device {
namespace {

using twin::Control;
using twin::Library;

class DriverTest : public testing::TestWithParam<Vendor> {
 protected:
  bool cuda() const { return GetParam() == Vendor::kCuda; }
  // The error of loading this library; empty: none.
  std::string Error(const std::string& library) {
    const Status status = Driver::Get(GetParam(), library, &driver);
    return status.ok() ? "" : status.message();
  }
  // Another spelling of the same file is another driver on the same twin.
  std::string Again(const std::string& spelling, const std::string& variant = "") {
    return spelling + Library(GetParam(), variant);
  }

  const Driver* driver = nullptr;
};
INSTANTIATE_ON_TWIN(DriverTest);

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_P(DriverTest, MissingLibraryIsNamedWithTheVersionThatIsNeeded) {
  const std::string error = Error("/nowhere/libgpu.so.9");
  EXPECT_TRUE(Has(error, "/nowhere/libgpu.so.9")) << error;
  EXPECT_TRUE(Has(error, cuda() ? "CUDA 12, NVIDIA driver 525 or newer" : "ROCm 6.0 or newer"))
      << error;
}

TEST_P(DriverTest, MissingSymbolsAreNamedWithTheVersionThatHasThem) {
  const std::string error = Error("xla_ffi/device/twin/libgpu_lacking_twin.so");
  EXPECT_TRUE(Has(error, "libgpu_lacking_twin.so lacks ")) << error;
  EXPECT_TRUE(Has(error, cuda() ? "cuStreamCreateWithPriority" : "hipStreamCreateWithPriority"))
      << error;
  EXPECT_TRUE(Has(error, cuda() ? "CUDA 12, NVIDIA driver 525" : "ROCm 6.0 or newer")) << error;
  EXPECT_FALSE(Has(error, "WaitValue")) << "optional: " << error;
}

TEST_P(DriverTest, TooOldDriverIsAnErrorUntilItIsReplaced) {
  const Control control(GetParam());
  const int64_t now = cuda() ? 12080 : 60342134;
  control.Set("driver_version", cuda() ? 11080 : 50221153);
  const std::string error = Error(Again("./"));
  EXPECT_TRUE(Has(error, cuda() ? "CUDA 11.8" : "ROCm 5.2")) << error;
  EXPECT_TRUE(Has(error, cuda() ? "CUDA 12.0 (NVIDIA driver 525) or newer" : "ROCm 6.0 or newer"))
      << error;
  control.Set("driver_version", now);
  EXPECT_EQ(Error(Again("./")), "");
  EXPECT_EQ(driver->version(), now);
}

TEST_P(DriverTest, NoDeviceIsNoErrorUntilOneIsOpened) {
  const Control control(GetParam());
  control.Set("devices", 0);
  EXPECT_EQ(Error(Again("././")), "");
  control.Set("devices", 2);
  EXPECT_EQ(driver->device_count(), 0);
  const Gpu* gpu = nullptr;
  const Status status = driver->Open(0, &gpu);
  ASSERT_FALSE(status.ok());
  EXPECT_TRUE(Has(status.message(), cuda() ? "finds no CUDA device: cuInit says "
                                             "CUDA_ERROR_NO_DEVICE: no device is detected"
                                           : "finds no ROCm device: hipInit says hipErrorNoDevice"))
      << status.message();
  EXPECT_FALSE(driver->OpenCurrent(&gpu).ok());
}

TEST_P(DriverTest, FailingInitialisationNamesTheCall) {
  const Control control(GetParam());
  control.Fail(cuda() ? "cuInit" : "hipInit", 1, 999);
  const std::string error = Error(Again("./././"));
  EXPECT_TRUE(Has(error, cuda() ? "cuInit says error 999" : "hipInit says hipErrorUnknown"))
      << error;
  control.Fail(cuda() ? "cuDeviceGetCount" : "hipGetDeviceCount", 1, 2);
  EXPECT_TRUE(Has(Error(Again("./././")), cuda() ? "OUT_OF_MEMORY" : "OutOfMemory"));
  EXPECT_EQ(Error(Again("./././")), "");
}

TEST_P(DriverTest, OrdinalsAreChecked) {
  ASSERT_EQ(Error(Library(GetParam())), "");
  const Gpu* gpu = nullptr;
  for (int ordinal : {-1, 2}) {
    const Status status = driver->Open(ordinal, &gpu);
    ASSERT_FALSE(status.ok());
    EXPECT_TRUE(Has(status.message(), "device " + std::to_string(ordinal))) << status.message();
    EXPECT_TRUE(Has(status.message(), "has 2 (0 to 1)")) << status.message();
  }
}

TEST_P(DriverTest, AllThreadsGetTheSameDriverAndDevices) {
  std::vector<const Driver*> drivers(4);
  std::vector<const Gpu*> gpus(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      EXPECT_TRUE(Driver::Get(GetParam(), Again("././././"), &drivers[i]).ok());
      EXPECT_TRUE(drivers[i]->Open(1, &gpus[i]).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 1; i < 4; ++i) {
    EXPECT_EQ(drivers[i], drivers[0]);
    EXPECT_EQ(gpus[i], gpus[0]);
  }
  EXPECT_EQ(gpus[0]->ordinal(), 1);
}

TEST_P(DriverTest, OptionalSymbolsThatAreMissingAreCapabilities) {
  ASSERT_EQ(Error(Library(GetParam(), "old")), "");
  const Gpu* gpu = nullptr;
  ASSERT_OK(driver->Open(0, &gpu));
  const Capabilities& can = gpu->capabilities();
  EXPECT_FALSE(can.stream_memory_operations || can.waits_on_registered_memory ||
               can.host_functions || can.dma_buf || can.host_flush);
  const char* const wait = cuda() ? "cuStreamWaitValue32_v2" : "hipStreamWaitValue32";
  EXPECT_TRUE(Has(can.missing, wait)) << can.missing;
  EXPECT_TRUE(Has(can.missing, cuda() ? "cuLaunchHostFunc" : "hipLaunchHostFunc")) << can.missing;

  ASSERT_OK(gpu->MakeCurrent());
  Stream stream = nullptr;
  ASSERT_OK(gpu->StreamCreate(false, &stream));
  void* device = nullptr;
  ASSERT_OK(gpu->MemAlloc(8, &device));
  int descriptor = -1;
  uint64_t offset = 0;
  for (const Status& status :
       {gpu->StreamWaitValue32(stream, device, 1, Compare::kEqual),
        gpu->StreamWriteValue32(stream, device, 1), gpu->LaunchHostFunc(stream, nullptr, nullptr),
        gpu->FlushRemoteWrites(), gpu->ExportDmaBuf(device, 8, &descriptor, &offset)}) {
    ASSERT_FALSE(status.ok());
    EXPECT_TRUE(Has(status.message(), " lacks ")) << status.message();
  }
  EXPECT_TRUE(Has(gpu->StreamWaitValue32(stream, device, 1, Compare::kEqual).message(), wait));
  ASSERT_OK(gpu->StreamDestroy(stream));
  Control(Library(GetParam(), "old")).Reset();
}

// The libraries that the machine has, if any. Without a GPU they load and find no device.
TEST_P(DriverTest, RealLibraryLoads) {
  const Status status = Driver::Get(GetParam(), "", &driver);
  if (!status.ok() && Has(status.message(), "cannot open shared object file")) {
    GTEST_SKIP() << "not installed here (Debian: libamdhip64-5): " << status.message();
  }
  ASSERT_OK(status);
  const Gpu* gpu = nullptr;
  const Status opened = driver->Open(0, &gpu);
  if (driver->device_count() > 0) {
    EXPECT_TRUE(opened.ok()) << opened.message();
    return;
  }
  ASSERT_FALSE(opened.ok());
  EXPECT_TRUE(Has(opened.message(), "finds no ")) << opened.message();
  RecordProperty("says", opened.message());
}

}  // namespace
}  // namespace hetccl::device
