#include "xla_ffi/common/copy.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace hetccl {
namespace {

TEST(CopyStreaming, CopiesExactlyTheBytesAskedForAtAnyAlignment) {
  std::vector<unsigned char> source(5000);
  std::iota(source.begin(), source.end(), 1);
  for (size_t to = 0; to < 70; to += 7) {
    for (size_t from = 0; from < 70; from += 9) {
      for (size_t size : {0, 1, 15, 63, 64, 65, 127, 128, 1000, 4096}) {
        std::vector<unsigned char> target(5000, 0xEE), expected(5000, 0xEE);
        CopyStreaming(target.data() + to, source.data() + from, size);
        std::copy_n(source.begin() + from, size, expected.begin() + to);
        ASSERT_EQ(target, expected) << to << " " << from << " " << size;
      }
    }
  }
}

}  // namespace
}  // namespace hetccl
