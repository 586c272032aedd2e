#include "xla_ffi/transport/shm/layout.h"

#include <gtest/gtest.h>

#include <vector>

namespace hetccl::transport::shm {
namespace {

constexpr size_t kLarge = 4 << 20;

std::vector<size_t> Slots(size_t slot_bytes, size_t payload) {
  std::vector<size_t> filled;
  size_t left = kPayloadOffset + payload;
  while (left > 0) {
    filled.push_back(BytesInSlot(filled.size(), slot_bytes, left));
    if (filled.back() == 0 || filled.back() > slot_bytes || filled.back() > left) break;
    left -= filled.back();
  }
  EXPECT_EQ(left, 0u) << "slots of " << slot_bytes << ", payload of " << payload;
  return filled;
}

TEST(BytesInSlot, AllOfAMessage) {
  for (size_t slot_bytes : {size_t{4096}, size_t{128} << 10, size_t{1} << 20, kLarge}) {
    for (size_t payload : {size_t{0}, size_t{1}, slot_bytes - kPayloadOffset, slot_bytes,
                           3 * slot_bytes + 7, 64 * slot_bytes}) {
      EXPECT_GT(Slots(slot_bytes, payload).front(), 0u);
    }
  }
}

TEST(BytesInSlot, SmallSlotsAreFull) {
  const std::vector<size_t> filled = Slots(128 << 10, 1 << 20);
  EXPECT_EQ(filled.size(), 9u);
  for (size_t i = 0; i + 1 < filled.size(); ++i) EXPECT_EQ(filled[i], size_t{128} << 10);
}

TEST(BytesInSlot, SmallMessagesTakeOneSlot) {
  EXPECT_EQ(Slots(kLarge, 4096).size(), 1u);
  EXPECT_EQ(Slots(kLarge, kLeastInSlot - kPayloadOffset).size(), 1u);
}

TEST(BytesInSlot, LargeSlotsRiseAndFall) {
  const std::vector<size_t> filled = Slots(kLarge, 256 << 20);
  EXPECT_EQ(filled[0], kLeastInSlot);
  EXPECT_EQ(filled[1], 2 * kLeastInSlot);
  EXPECT_EQ(filled[5], kLarge);
  EXPECT_LE(filled.back(), kLeastInSlot);
  EXPECT_LE(filled.size(), 72u) << "64 full ones would do";
}

}  // namespace
}  // namespace hetccl::transport::shm
