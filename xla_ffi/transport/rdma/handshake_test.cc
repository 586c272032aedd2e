#include "xla_ffi/transport/rdma/handshake.h"

#include <gtest/gtest.h>

namespace hetccl::transport::rdma {
namespace {

TEST(ProbeBound, LeavesTimeForALostPacket) {
  EXPECT_EQ(ProbeBound(14), kHandshakeBound);
  EXPECT_NEAR(ToSeconds(ProbeBound(18)), 8.6, 0.1);
  EXPECT_NEAR(ToSeconds(ProbeBound(20)), 34.4, 0.1);
  EXPECT_EQ(ProbeBound(21), std::chrono::seconds(60));
  EXPECT_EQ(ProbeBound(31), std::chrono::seconds(60));
}

}  // namespace
}  // namespace hetccl::transport::rdma
