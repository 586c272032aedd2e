#include "xla_ffi/exchange/plan.h"

#include <gtest/gtest.h>

#include <limits>

namespace hetccl {
namespace {

DevicePlan Make(const std::vector<PeerRange>& sends, const std::vector<PeerRange>& receives = {},
                std::vector<ZeroRange> zeros = {}) {
  return DevicePlan(1, "psum/data f32[8]", 2, 0, sends, receives, std::move(zeros));
}

TEST(DevicePlan, RangesWithOnePeerAreOneMessageInOrder) {
  const DevicePlan plan = Make({{5, 0, 0, 4}, {3, 0, 4, 4}, {5, 1, 8, 16}});
  ASSERT_EQ(plan.sends().size(), 2u);
  EXPECT_EQ(plan.sends()[0].peer, 5u);
  EXPECT_EQ(plan.sends()[0].bytes, 20u);
  ASSERT_EQ(plan.sends()[0].ranges.size(), 2u);
  EXPECT_EQ(plan.sends()[0].ranges[1].offset, 8u);
  EXPECT_EQ(plan.sends()[1].peer, 3u);
}

TEST(DevicePlan, ComparesByContent) {
  EXPECT_TRUE(Make({{5, 0, 0, 4}}).SameAs(Make({{5, 0, 0, 4}})));
  EXPECT_FALSE(Make({{5, 0, 0, 4}}).SameAs(Make({{5, 0, 4, 4}})));
  EXPECT_FALSE(Make({{5, 0, 0, 4}}).SameAs(Make({}, {{5, 0, 0, 4}})));
  EXPECT_FALSE(Make({}, {}, {{0, 0, 4}}).SameAs(Make({})));
}

TEST(DevicePlan, RangesMustLieInTheirBuffers) {
  std::byte memory[8];
  const std::vector<BufferView> one = {{memory, 8}};
  EXPECT_TRUE(Make({{5, 0, 4, 4}}, {{5, 0, 0, 8}}).Check(one, one).ok());
  EXPECT_TRUE(Make({{5, 0, 8, 0}}).Check(one, {}).ok());
  EXPECT_FALSE(Make({{5, 0, 5, 4}}).Check(one, one).ok());
  EXPECT_FALSE(Make({{5, 1, 0, 4}}).Check(one, one).ok());
  EXPECT_FALSE(Make({}, {{5, 0, 0, 4}}).Check(one, {}).ok());
  EXPECT_FALSE(Make({}, {}, {{0, 8, 1}}).Check(one, one).ok());
  // No overflow.
  const uint64_t huge = std::numeric_limits<uint64_t>::max();
  EXPECT_FALSE(Make({{5, 0, 8, huge}}).Check(one, one).ok());
  EXPECT_FALSE(Make({{5, 0, huge, 8}}).Check(one, one).ok());
}

}  // namespace
}  // namespace hetccl
