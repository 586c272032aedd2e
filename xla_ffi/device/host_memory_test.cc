#include "xla_ffi/device/host_memory.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace hetccl::device {
namespace {

TEST(PreferHugePages, NeverChangesContents) {
  for (size_t bytes : {size_t{0}, size_t{100}, kHugePagesFrom - 1, size_t{9} << 20}) {
    std::vector<unsigned char> data(bytes, 0x5A);
    PreferHugePages(data.data() + (bytes > 3 ? 3 : 0), bytes > 3 ? bytes - 3 : bytes);
    for (unsigned char byte : data) ASSERT_EQ(byte, 0x5A);
  }
}

}  // namespace
}  // namespace hetccl::device
