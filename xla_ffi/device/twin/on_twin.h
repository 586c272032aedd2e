// A fixture for tests that use a GPU of the test twin, once under the names of each vendor.
#ifndef XLA_FFI_DEVICE_TWIN_ON_TWIN_H_
#define XLA_FFI_DEVICE_TWIN_ON_TWIN_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/common/test_status.h"
#include "xla_ffi/device/driver/driver.h"
#include "xla_ffi/device/driver/gpu.h"
#include "xla_ffi/device/twin/control.h"

namespace hetccl::twin {

class OnTwin : public testing::TestWithParam<device::Vendor> {
 protected:
  // The twin starts and ends each test empty; device 0 is current on the test's thread.
  void SetUp() override {
    control.Reset();
    ASSERT_OK(device::Driver::Get(GetParam(), Library(GetParam()), &driver));
    ASSERT_OK(driver->Open(0, &gpu));
    ASSERT_OK(gpu->MakeCurrent());
  }
  void TearDown() override { control.Reset(); }

  bool cuda() const { return GetParam() == device::Vendor::kCuda; }
  // The exported name of a call, under which failures, delays and counts are kept.
  const char* Name(const char* cuda_name, const char* hip_name) const {
    return cuda() ? cuda_name : hip_name;
  }

  device::Stream NewStream() const {
    device::Stream stream = nullptr;
    EXPECT_TRUE(gpu->StreamCreate(false, &stream).ok());
    return stream;
  }
  device::Event NewEvent() const {
    device::Event event = nullptr;
    EXPECT_TRUE(gpu->EventCreate(&event).ok());
    return event;
  }
  device::Signal NewSignal() const {
    device::Signal signal;
    EXPECT_TRUE(gpu->SignalAlloc(&signal).ok());
    return signal;
  }
  static void Set(const device::Signal& signal, uint32_t value) {
    __atomic_store_n(signal.host, value, __ATOMIC_RELEASE);
  }
  static uint32_t Get(const device::Signal& signal) {
    return __atomic_load_n(signal.host, __ATOMIC_ACQUIRE);
  }
  bool Done(device::Stream stream) const {
    bool done = false;
    EXPECT_TRUE(gpu->StreamQuery(stream, &done).ok());
    return done;
  }
  // Gives the twin's threads time to do what they must not do.
  static void Wait() { std::this_thread::sleep_for(Seconds(0.02)); }
  // Until the condition holds, at most 10 s. False: it never did.
  template <typename Condition>
  static bool Eventually(Condition condition) {
    for (const TimePoint end = Clock::now() + Seconds(10); !condition();) {
      if (Clock::now() > end) return false;
      std::this_thread::sleep_for(Seconds(0.0005));
    }
    return true;
  }

  const Control control{GetParam()};
  const device::Driver* driver = nullptr;
  const device::Gpu* gpu = nullptr;
};

inline std::string VendorName(const testing::TestParamInfo<device::Vendor>& vendor) {
  return device::PlatformName(vendor.param);
}

#define INSTANTIATE_ON_TWIN(Fixture)                                                    \
  INSTANTIATE_TEST_SUITE_P(                                                             \
      Twin, Fixture,                                                                    \
      testing::Values(::hetccl::device::Vendor::kCuda, ::hetccl::device::Vendor::kHip), \
      ::hetccl::twin::VendorName)

}  // namespace hetccl::twin

#endif  // XLA_FFI_DEVICE_TWIN_ON_TWIN_H_
