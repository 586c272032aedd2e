#include "xla_ffi/transport/tcp/traffic_secret.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace hetccl::transport::tcp {
namespace {

// The client's of RFC 8448, 3: "Derive write traffic keys for application data".
const std::string kSecret = "9e40646ce79a7f9dc05af8889bce6552875afa0b06df0087f792ebb7c17504a5";
const std::string kWriteKey = "17422dda596ed5d9acd890e3c63f5051";
const std::string kWriteIv = "5b78923dee08579033e523d9";
// Of the secret behind it, which no RFC has; made with the HKDFExpand of pyca/cryptography.
const std::string kNextKey = "3879d82f5f14056e623f2ce5bfc66fce";
const std::string kNextIv = "5dfb2c5938c3379b6cc5d1f2";

std::string Hex(const unsigned char* bytes, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    text += "0123456789abcdef"[bytes[i] >> 4];
    text += "0123456789abcdef"[bytes[i] & 15];
  }
  return text;
}

class Traffic : public ::testing::Test {
 protected:
  void SetUp() override {
    const Status status = openssl::Load(&library_);
    ASSERT_TRUE(status.ok()) << status.message();
  }

  const openssl::Library* library_ = nullptr;
};

TEST_F(Traffic, KeysAreThoseOfTheRfc) {
  TrafficSecret secret;
  secret.Read("CLIENT_TRAFFIC_SECRET_0 cb34ec " + kSecret);
  ASSERT_TRUE(secret.known());
  TrafficKey key;
  ASSERT_TRUE(secret.Derive(*library_, &key));
  EXPECT_EQ(Hex(key.key, sizeof(key.key)), kWriteKey);
  EXPECT_EQ(Hex(key.iv, sizeof(key.iv)), kWriteIv);
  ASSERT_TRUE(secret.Advance(*library_));
  ASSERT_TRUE(secret.Derive(*library_, &key));
  EXPECT_EQ(Hex(key.key, sizeof(key.key)), kNextKey);
  EXPECT_EQ(Hex(key.iv, sizeof(key.iv)), kNextIv);
}

TEST_F(Traffic, OnlyTheClientsFirstSecretIsTaken) {
  TrafficSecret secret;
  secret.Read("SERVER_TRAFFIC_SECRET_0 cb34ec " + kSecret);
  secret.Read("CLIENT_HANDSHAKE_TRAFFIC_SECRET cb34ec " + kSecret);
  secret.Read("CLIENT_TRAFFIC_SECRET_0 cb34ec " + kSecret.substr(2));
  secret.Read("CLIENT_TRAFFIC_SECRET_0 cb34ec x" + kSecret.substr(1));
  EXPECT_FALSE(secret.known());
}

TEST_F(Traffic, ASecretHasOneOwner) {
  TrafficSecret secret;
  secret.Read("CLIENT_TRAFFIC_SECRET_0 cb34ec " + kSecret);
  const TrafficSecret owner(std::move(secret));
  EXPECT_FALSE(secret.known());
  ASSERT_TRUE(owner.known());
  TrafficKey of_owner, of_other;
  ASSERT_TRUE(owner.Derive(*library_, &of_owner));
  ASSERT_TRUE(secret.Derive(*library_, &of_other));
  EXPECT_EQ(Hex(of_owner.key, sizeof(of_owner.key)), kWriteKey);
  EXPECT_NE(Hex(of_other.key, sizeof(of_other.key)), kWriteKey) << "its bytes are still there";
}

}  // namespace
}  // namespace hetccl::transport::tcp
