#include "xla_ffi/transport/tcp/lanes.h"

#include <gtest/gtest.h>

namespace hetccl::transport::tcp {
namespace {

TEST(StripeOf, CoversThePayloadOnceInOrder) {
  for (size_t bytes :
       {size_t{0}, size_t{1}, kStripeAbove, kStripeAbove + 1, size_t{1000003}, size_t{64} << 20}) {
    for (size_t lanes = 1; lanes <= 8; ++lanes) {
      size_t at = 0;
      for (size_t lane = 0; lane < lanes; ++lane) {
        const Stripe stripe = StripeOf(bytes, lane, lanes);
        if (stripe.begin == stripe.end) continue;
        EXPECT_EQ(stripe.begin, at);
        EXPECT_LT(stripe.begin, stripe.end);
        at = stripe.end;
      }
      EXPECT_EQ(at, bytes) << lanes << " lanes";
    }
  }
}

TEST(StripeOf, SmallPayloadsUseTheFirstSocket) {
  EXPECT_EQ(StripeOf(kStripeAbove, 0, 4).end, kStripeAbove);
  EXPECT_EQ(StripeOf(kStripeAbove, 1, 4).end, StripeOf(kStripeAbove, 1, 4).begin);
}

TEST(PrepareSockets, RefusesNone) { EXPECT_FALSE(PrepareSockets({}).ok()); }

}  // namespace
}  // namespace hetccl::transport::tcp
