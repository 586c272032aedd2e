#include "xla_ffi/transport/message.h"

#include <gtest/gtest.h>

#include <cstring>

namespace hetccl::transport {
namespace {

TEST(Message, AFreshHeaderIsValid) {
  EXPECT_TRUE(CheckHeader(MakeHeader(MessageType::kData)).ok());
  EXPECT_TRUE(CheckHeader(MakeHeader(MessageType::kGoodbye)).ok());
}

TEST(Message, DamagedHeadersAreCorrupt) {
  WireHeader magic = MakeHeader(MessageType::kData);
  magic.magic ^= 0x100;
  WireHeader version = MakeHeader(MessageType::kData);
  version.version += 1;
  WireHeader type = MakeHeader(static_cast<MessageType>(9));
  for (const WireHeader& header : {magic, version, type, WireHeader{}}) {
    const Status status = CheckHeader(header);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.kind(), ErrorKind::kCorrupt);
  }
  EXPECT_NE(CheckHeader(version).message().find("same jax_hetccl"), std::string::npos);
}

TEST(Message, TextIsCutAndMadePrintable) {
  WireHeader header = MakeHeader(MessageType::kData);
  SetText(&header, std::string(300, 'x'));
  EXPECT_EQ(Text(header), std::string(127, 'x'));
  SetText(&header, "short");
  EXPECT_EQ(Text(header), "short");
  std::memset(header.text, 0x07, sizeof(header.text));
  EXPECT_EQ(Text(header), std::string(128, '?'));
}

TEST(Message, LayoutIsFixed) {
  EXPECT_EQ(offsetof(WireHeader, epoch), 16u);
  EXPECT_EQ(offsetof(WireHeader, payload_bytes), 48u);
  EXPECT_EQ(offsetof(WireHeader, text), 64u);
}

}  // namespace
}  // namespace hetccl::transport
