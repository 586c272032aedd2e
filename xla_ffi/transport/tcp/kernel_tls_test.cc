// What the kernel makes of it is read by OpenSSL in tls_test.cc; here are the records themselves.
#include "xla_ffi/transport/tcp/kernel_tls.h"

#include <gtest/gtest.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "xla_ffi/common/fd.h"
#include "xla_ffi/transport/testing/tcp_pair.h"

#if __has_include(<linux/tls.h>)
#include <linux/tls.h>
#endif

namespace hetccl::transport::tcp {
namespace {

#ifdef TLS_1_3_VERSION
using Theirs = tls12_crypto_info_aes_gcm_128;
static_assert(kernel::kTlsTx == TLS_TX);
static_assert(kernel::kTlsSetRecordType == TLS_SET_RECORD_TYPE);
static_assert(kernel::kTls13 == TLS_1_3_VERSION);
static_assert(kernel::kAesGcm128 == TLS_CIPHER_AES_GCM_128);
static_assert(sizeof(kernel::CryptoInfo) == sizeof(Theirs));
static_assert(offsetof(kernel::CryptoInfo, cipher) == offsetof(tls_crypto_info, cipher_type));
static_assert(offsetof(kernel::CryptoInfo, iv) == offsetof(Theirs, iv));
static_assert(offsetof(kernel::CryptoInfo, key) == offsetof(Theirs, key));
static_assert(offsetof(kernel::CryptoInfo, salt) == offsetof(Theirs, salt));
static_assert(offsetof(kernel::CryptoInfo, sequence) == offsetof(Theirs, rec_seq));
#endif
#ifdef SOL_TLS
static_assert(kernel::kSolTls == SOL_TLS);
#endif
#ifdef TCP_ULP
static_assert(kernel::kTcpUlp == TCP_ULP);
#endif

constexpr int kHead = 5;       // bytes of a record: type, version, length
constexpr int kOverhead = 17;  // and behind the data: its type and the tag
constexpr uint64_t kMany = 1000;

class KernelTlsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!WhyNoKernelTls().empty()) GTEST_SKIP() << WhyNoKernelTls();
    std::tie(client_, server_) = testing::LoopbackTcpPair();
    ASSERT_TRUE(openssl::Load(&library_).ok());
  }

  static TrafficSecret Secret() {
    TrafficSecret secret;
    secret.Read("CLIENT_TRAFFIC_SECRET_0 0 " + std::string(64, 'a'));
    return secret;
  }

  void Start(uint64_t records_per_key) {
    const Status status =
        KernelTls::Start(client_.get(), Secret(), records_per_key, *library_, &tls_);
    ASSERT_TRUE(status.ok()) << status.message();
  }

  void Send(size_t bytes) {
    const std::string data(bytes, 'd');
    const iovec piece = {const_cast<char*>(data.data()), bytes};
    ASSERT_EQ(tls_->Send(&piece, 1).bytes, bytes);
  }

  // The lengths of the data in the next records on the wire.
  std::vector<int> Lengths(int records) {
    std::vector<int> lengths;
    for (int i = 0; i < records; ++i) {
      pollfd arrived = {server_.get(), POLLIN, 0};
      if (::poll(&arrived, 1, 20000) != 1) break;
      unsigned char head[kHead];
      EXPECT_EQ(::recv(server_.get(), head, kHead, MSG_WAITALL), kHead);
      EXPECT_EQ(head[0], 23) << "also what is no data looks like data";
      std::string body(head[3] << 8 | head[4], 0);
      EXPECT_EQ(::recv(server_.get(), body.data(), body.size(), MSG_WAITALL),
                static_cast<ssize_t>(body.size()));
      lengths.push_back(static_cast<int>(body.size()) - kOverhead);
    }
    return lengths;
  }

  // Whether the kernel has this secret's key and `sent` records were sent with it.
  void ExpectKernelHas(const TrafficSecret& secret, int sent) {
    TrafficKey key;
    ASSERT_TRUE(secret.Derive(*library_, &key));
    kernel::CryptoInfo info = {};
    socklen_t size = sizeof(info);
    ASSERT_EQ(::getsockopt(client_.get(), kernel::kSolTls, kernel::kTlsTx, &info, &size), 0);
    EXPECT_EQ(std::memcmp(info.key, key.key, sizeof(info.key)), 0);
    EXPECT_EQ(std::memcmp(info.salt, key.iv, sizeof(info.salt)), 0);
    EXPECT_EQ(std::memcmp(info.iv, key.iv + sizeof(info.salt), sizeof(info.iv)), 0);
    EXPECT_EQ(info.sequence[7], sent);
  }

  UniqueFd client_, server_;
  const openssl::Library* library_ = nullptr;
  std::unique_ptr<KernelTls> tls_;
};

TEST_F(KernelTlsTest, RecordsHoldUpTo16KB) {
  Start(kMany);
  Send(40000);
  EXPECT_EQ(Lengths(3), (std::vector<int>{16384, 16384, 40000 - 2 * 16384}));
  ExpectKernelHas(Secret(), 3);
}

TEST_F(KernelTlsTest, ANewKeyIsAnnouncedAndCountsFromZero) {
  Start(kMany);
  Send(100);
  ASSERT_EQ(tls_->Renew().how, Moved::How::kSome);
  TrafficSecret next = Secret();
  ASSERT_TRUE(next.Advance(*library_));
  ExpectKernelHas(next, 0);
  Send(100);
  ExpectKernelHas(next, 1);
  EXPECT_EQ(Lengths(3), (std::vector<int>{100, 5, 100}));
}

TEST_F(KernelTlsTest, KeysAreRenewedAfterTheirRecords) {
  Start(3);
  for (int i = 0; i < 3; ++i) Send(20000);  // each makes two
  EXPECT_EQ(Lengths(7), (std::vector<int>{16384, 3616, 16384, 3616, 5, 16384, 3616}));
}

TEST_F(KernelTlsTest, AnAlertIsARecord) {
  Start(kMany);
  EXPECT_EQ(tls_->Send(Alert::kCloseNotify).how, Moved::How::kSome);
  EXPECT_EQ(Lengths(1), std::vector<int>{2});
}

TEST_F(KernelTlsTest, WithoutRoomForTheAnnouncementTheKeyStays) {
  Start(kMany);
  const std::string data(1 << 20, 'd');
  const iovec piece = {const_cast<char*>(data.data()), data.size()};
  while (tls_->Send(&piece, 1).how == Moved::How::kSome) continue;
  EXPECT_EQ(tls_->Renew().how, Moved::How::kNothing);
  kernel::CryptoInfo info = {};
  socklen_t size = sizeof(info);
  ASSERT_EQ(::getsockopt(client_.get(), kernel::kSolTls, kernel::kTlsTx, &info, &size), 0);
  TrafficKey key;
  ASSERT_TRUE(Secret().Derive(*library_, &key));
  EXPECT_EQ(std::memcmp(info.key, key.key, sizeof(info.key)), 0);
}

TEST(KernelTls, ASocketThatIsNotTcpIsRefused) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  const UniqueFd end(ends[0]), other(ends[1]);
  const openssl::Library* library = nullptr;
  ASSERT_TRUE(openssl::Load(&library).ok());
  std::unique_ptr<KernelTls> tls;
  const Status status = KernelTls::Start(end.get(), TrafficSecret(), 1, *library, &tls);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("the kernel's TLS: "), std::string::npos) << status.message();
}

}  // namespace
}  // namespace hetccl::transport::tcp
