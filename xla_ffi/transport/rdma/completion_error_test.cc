#include "xla_ffi/transport/rdma/completion_error.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "xla_ffi/transport/rdma/abi.h"

namespace hetccl::transport::rdma {
namespace {

TEST(CompletionError, EveryStatusHasATextOfItsOwnThatNamesThePort) {
  std::set<std::string> texts;
  for (int status = 1; status <= 23; ++status) {
    const Status error = CompletionError(status, 0, "rdma mlx5_3 port 1");
    ASSERT_FALSE(error.ok());
    EXPECT_EQ(error.message().rfind("rdma mlx5_3 port 1: ", 0), 0u) << error.message();
    texts.insert(error.message());
  }
  EXPECT_EQ(texts.size(), 23u);
}

TEST(CompletionError, KindsSayWhoseFaultItIs) {
  const auto kind = [](int status) { return CompletionError(status, 0, "").kind(); };
  EXPECT_EQ(kind(abi::kWcRetryExceeded), ErrorKind::kPeerLost);
  EXPECT_EQ(kind(abi::kWcResponseTimeout), ErrorKind::kPeerLost);
  EXPECT_EQ(kind(abi::kWcRemoteAborted), ErrorKind::kPeerLost);
  EXPECT_EQ(kind(abi::kWcRemoteAccess), ErrorKind::kCorrupt);
  EXPECT_EQ(kind(abi::kWcRnrRetryExceeded), ErrorKind::kCorrupt);
  EXPECT_EQ(kind(abi::kWcLocalProtection), ErrorKind::kInternal);
  EXPECT_EQ(kind(99), ErrorKind::kInternal);
}

TEST(CompletionError, PassesTheVendorsCodeOn) {
  EXPECT_NE(CompletionError(abi::kWcFatal, 137, "").message().find("vendor code 137"),
            std::string::npos);
}

}  // namespace
}  // namespace hetccl::transport::rdma
