#include "xla_ffi/device/copy_pool.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

namespace hetccl::device {
namespace {

std::vector<std::byte> Numbers(size_t size, int seed) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 31 + i / 255 + seed);
  return bytes;
}

void WaitFor(Copier& copier, uint64_t count) {
  uint64_t ended = 0;
  while (ended < count) {
    ASSERT_TRUE(copier.Poll(&ended).ok());
    std::this_thread::yield();
  }
}

TEST(CopyPool, CopiesLargeAndSmallInOrderOfSubmission) {
  auto pool = std::make_shared<CopyPool>(3);
  const auto copier = MakePoolCopier(pool);
  const std::vector<size_t> sizes = {5 << 20, 100, 3 << 20, (2 << 20) + 7};
  std::vector<std::vector<std::byte>> from, to;
  for (size_t i = 0; i < sizes.size(); ++i) {
    from.push_back(Numbers(sizes[i], static_cast<int>(i)));
    to.emplace_back(sizes[i]);
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    // In two pieces.
    const size_t cut = sizes[i] / 3;
    const CopyPiece pieces[] = {{to[i].data(), from[i].data(), cut},
                                {to[i].data() + cut, from[i].data() + cut, sizes[i] - cut}};
    ASSERT_TRUE(copier->Submit(pieces, 2, /*past_cache=*/i % 2 == 0).ok());
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    WaitFor(*copier, i + 1);
    EXPECT_TRUE(from[i] == to[i]) << i;
  }
  EXPECT_TRUE(copier->Quiet());
  EXPECT_GT(pool->threads(), 0);
  EXPECT_LE(pool->threads(), 3);
}

TEST(CopyPool, RefusesMoreThanItsDepthAndStartsNoThreadForSmallCopies) {
  const std::vector<std::byte> large = Numbers(64 << 20, 1);
  std::vector<std::byte> out(large.size());
  auto pool = std::make_shared<CopyPool>(1);
  const auto copier = MakePoolCopier(pool);  // waits for its copies before the memory goes
  std::byte from[10] = {}, to[10];
  const CopyPiece piece{to, from, 10};
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(copier->Submit(&piece, 1, false).ok());
  EXPECT_EQ(pool->threads(), 0);
  bool refused = false;
  for (int i = 0; i < copier->depth() + 1 && !refused; ++i) {
    const CopyPiece all{out.data(), large.data(), large.size()};
    refused = !copier->Submit(&all, 1, false).ok();
  }
  EXPECT_TRUE(refused);
}

TEST(CopyPool, StoppingRunsWhatWasPosted) {
  auto pool = std::make_shared<CopyPool>(2);
  const auto copier = MakePoolCopier(pool);
  const std::vector<std::byte> from = Numbers(8 << 20, 2);
  std::vector<std::byte> to(from.size());
  const CopyPiece piece{to.data(), from.data(), from.size()};
  ASSERT_TRUE(copier->Submit(&piece, 1, false).ok());
  pool->Stop();
  EXPECT_TRUE(copier->Quiet());
  EXPECT_TRUE(from == to);
  EXPECT_EQ(pool->threads(), 0);
}

}  // namespace
}  // namespace hetccl::device
