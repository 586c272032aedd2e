#include "xla_ffi/transport/span_cursor.h"

#include <gtest/gtest.h>

#include <vector>

namespace hetccl::transport {
namespace {

class SpanCursorTest : public ::testing::Test {
 protected:
  // 0 | 3 | 0 | 5 | 2 | 0 bytes
  std::vector<std::byte> memory_ = std::vector<std::byte>(10);
  ConstPayload payload_ = {{memory_.data(), 0},     {memory_.data(), 3},     {memory_.data(), 0},
                           {memory_.data() + 3, 5}, {memory_.data() + 8, 2}, {memory_.data(), 0}};
  ptrdiff_t At(const std::byte* data) const { return data - memory_.data(); }
};

TEST_F(SpanCursorTest, VisitsEveryByteOnce) {
  for (size_t step = 1; step <= 10; ++step) {
    SpanCursor<ConstSpan> cursor(payload_);
    size_t at = 0;
    while (cursor.remaining() > 0) {
      EXPECT_EQ(cursor.remaining(), 10 - at);
      EXPECT_EQ(At(cursor.Front().data), static_cast<ptrdiff_t>(at));
      const size_t size = std::min(step, cursor.remaining());
      cursor.Advance(size);
      at += size;
    }
    EXPECT_EQ(at, 10u);
  }
}

TEST_F(SpanCursorTest, GathersWithinItsLimits) {
  SpanCursor<ConstSpan> cursor(payload_);
  cursor.Advance(1);
  iovec pieces[8];
  EXPECT_EQ(cursor.Gather(100, pieces, 8), 3);
  EXPECT_EQ(pieces[0].iov_len, 2u);
  EXPECT_EQ(pieces[1].iov_len, 5u);
  EXPECT_EQ(pieces[2].iov_len, 2u);
  EXPECT_EQ(cursor.Gather(100, pieces, 2), 2);
  EXPECT_EQ(cursor.Gather(4, pieces, 8), 2);
  EXPECT_EQ(pieces[1].iov_len, 2u);
  EXPECT_EQ(cursor.remaining(), 9u) << "gathering does not advance";
}

TEST_F(SpanCursorTest, TakesWhatIsThereInContiguousParts) {
  for (size_t limit = 1; limit <= 12; ++limit) {
    SpanCursor<ConstSpan> cursor(payload_);
    size_t total = 0;
    while (cursor.remaining() > 0) {
      size_t visited = 0;
      const size_t left = cursor.remaining();
      const size_t taken = cursor.Take(limit, [&](const ConstSpan& part, size_t offset) {
        EXPECT_EQ(offset, visited);
        EXPECT_GT(part.size, 0u);
        EXPECT_EQ(At(part.data), static_cast<ptrdiff_t>(total + visited));
        visited += part.size;
      });
      EXPECT_EQ(taken, std::min(limit, left));
      EXPECT_EQ(visited, taken);
      total += taken;
    }
    EXPECT_EQ(total, 10u);
  }
}

TEST_F(SpanCursorTest, SlicesAreConsecutive) {
  EXPECT_EQ(TotalSize(payload_), 10u);
  for (size_t cut = 0; cut <= 10; ++cut) {
    const ConstPayload left = Slice(payload_, 0, cut), right = Slice(payload_, cut, 10);
    EXPECT_EQ(TotalSize(left), cut);
    EXPECT_EQ(TotalSize(right), 10 - cut);
    if (cut < 10) {
      EXPECT_EQ(At(right.front().data), static_cast<ptrdiff_t>(cut));
    }
  }
}

TEST(SpanCursorEmpty, HasNothing) {
  EXPECT_EQ(SpanCursor<ConstSpan>().remaining(), 0u);
  EXPECT_EQ(SpanCursor<ConstSpan>(ConstPayload{}).remaining(), 0u);
}

}  // namespace
}  // namespace hetccl::transport
