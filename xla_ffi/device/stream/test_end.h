// Ends the streams of the test twins behind the last test: spaces keep theirs for ever. For tests
// only.
#ifndef XLA_FFI_DEVICE_STREAM_TEST_END_H_
#define XLA_FFI_DEVICE_STREAM_TEST_END_H_

#include <gtest/gtest.h>

#include "xla_ffi/device/twin/control.h"

namespace hetccl::device {

class EndOfTwins : public ::testing::Environment {
 public:
  void TearDown() override {
    for (Vendor vendor : {Vendor::kCuda, Vendor::kHip}) twin::Control(vendor).Reset();
  }
};

inline ::testing::Environment* const end_of_twins =
    ::testing::AddGlobalTestEnvironment(new EndOfTwins);

}  // namespace hetccl::device

#endif  // XLA_FFI_DEVICE_STREAM_TEST_END_H_
