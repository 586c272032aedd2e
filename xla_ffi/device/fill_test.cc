#include "xla_ffi/device/fill.h"

#include <gtest/gtest.h>

#include <vector>

namespace hetccl::device {
namespace {

TEST(FillPattern, RepeatsThePatternAndStopsAtTheEnd) {
  const unsigned char pattern[] = {1, 2, 3, 4, 5, 6, 7, 8};
  for (size_t pattern_bytes : {1, 2, 4, 8, 3}) {
    for (size_t bytes : {0, 1, 2, 7, 8, 9, 1000, 65536, 65537, 300001}) {
      std::vector<unsigned char> data(bytes + 1, 0xEE);
      FillPattern(data.data(), bytes, pattern, pattern_bytes);
      for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(data[i], pattern[i % pattern_bytes]) << i;
      ASSERT_EQ(data[bytes], 0xEE);
    }
  }
}

}  // namespace
}  // namespace hetccl::device
