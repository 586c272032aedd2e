#include "xla_ffi/transport/tcp/tls.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "xla_ffi/device/host_space.h"
#include "xla_ffi/transport/tcp/factory.h"
#include "xla_ffi/transport/tcp/kernel_tls.h"
#include "xla_ffi/transport/testing/tcp_pair.h"

namespace hetccl::transport::tcp {
namespace {

using testing::LoopbackTcpPair;  // a unix socket has no names for errors

const std::string kKey(kTlsKeyBytes, 'k');
constexpr auto kPatience = std::chrono::seconds(20);

// Closing it then makes the peer find an error instead of an end.
void SetReset(int fd) {
  const linger at_once = {1, 0};
  EXPECT_EQ(::setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once)), 0);
}

// As a GPU whose streams are held: slots come only when they are let go.
class HeldSpace final : public device::Space {
 public:
  void LetGo() { released_.set_value(); }

  std::string platform() const override { return host_.platform(); }
  std::string name() const override { return host_.name(); }
  bool addressable() const override { return false; }
  Status MakeCopier(device::Direction direction, size_t slot_bytes,
                    std::unique_ptr<device::Copier>* copier) override {
    return host_.MakeCopier(direction, slot_bytes, copier);
  }
  Status Register(void* data, size_t bytes, std::unique_ptr<device::SlotMemory>* memory) override {
    return host_.Register(data, bytes, memory);
  }
  Status Allocate(size_t bytes, std::unique_ptr<device::SlotMemory>* memory) override {
    if (let_go_.wait_for(3 * kPatience) != std::future_status::ready) {
      return InternalError("the streams are still held");
    }
    return host_.Allocate(bytes, memory);
  }
  void Expect(std::byte* data, size_t bytes) override { host_.Expect(data, bytes); }
  Status Zero(std::byte* data, size_t bytes, device::Queue queue) override {
    return host_.Zero(data, bytes, queue);
  }
  Status MarkStart(device::Queue queue, std::shared_ptr<device::Gate>* gate) override {
    return host_.MarkStart(queue, gate);
  }
  device::SpaceStats Stats() const override { return host_.Stats(); }

 private:
  device::HostSpace host_;
  std::promise<void> released_;
  std::shared_future<void> let_go_ = released_.get_future().share();
};

// Passes on what comes on either of two sockets, and keeps what came on the first.
class Relay {
 public:
  using Change = std::function<void(std::string* bytes)>;

  Relay(UniqueFd from, UniqueFd to)
      : from_(std::move(from)),
        to_(std::move(to)),
        there_([this] { Pass(from_.get(), to_.get(), true); }),
        back_([this] { Pass(to_.get(), from_.get(), false); }) {}
  ~Relay() {
    ::shutdown(from_.get(), SHUT_RDWR);
    ::shutdown(to_.get(), SHUT_RDWR);
    there_.join();
    back_.join();
  }

  void set_change(Change change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    change_ = std::move(change);
  }
  std::string seen() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return seen_;
  }

 private:
  void Pass(int from, int to, bool first) {
    std::string bytes(60000, 0);
    while (true) {
      bytes.resize(60000);
      const ssize_t count = ::recv(from, bytes.data(), bytes.size(), 0);
      if (count <= 0) break;
      bytes.resize(count);
      if (first) {
        const std::lock_guard<std::mutex> lock(mutex_);
        seen_ += bytes;
        if (change_) change_(&bytes);
      }
      size_t at = 0;
      while (at < bytes.size()) {
        const ssize_t sent = ::send(to, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
        if (sent <= 0) return;
        at += sent;
      }
    }
    ::shutdown(to, SHUT_WR);
  }

  UniqueFd from_, to_;
  std::mutex mutex_;
  Change change_;
  std::string seen_;
  std::thread there_, back_;
};

// The next thing that comes.
Moved Await(Stream* stream, void* data, size_t bytes) {
  const TimePoint deadline = Clock::now() + kPatience;
  Moved moved;
  while (moved.how == Moved::How::kNothing && Clock::now() < deadline) {
    moved = stream->Receive(data, bytes);
    pollfd ready = {stream->fd(), POLLIN, 0};
    if (moved.how == Moved::How::kNothing) (void)::poll(&ready, 1, 100);
  }
  return moved;
}

// Who makes the records that the sender sends.
enum class By { kOpenSsl, kKernel };

std::string NameOf(By by) { return by == By::kKernel ? "Kernel" : "OpenSsl"; }

// A channel of one socket through a relay.
class TlsChannel : public ::testing::Test {
 protected:
  explicit TlsChannel(By by) : by_(by) {
    auto [from, relay_from] = LoopbackTcpPair();
    auto [to, relay_to] = LoopbackTcpPair();
    from_.push_back(std::move(from));
    to_.push_back(std::move(to));
    relay_ = std::make_unique<Relay>(std::move(relay_from), std::move(relay_to));
  }

  void SetUp() override {
    if (by_ == By::kKernel && !WhyNoKernelTls().empty()) GTEST_SKIP() << WhyNoKernelTls();
  }

  Options With(const std::string& key) const {
    Options options;
    options.tls_keys = {key};
    options.patience = kPatience;
    options.tls_records_per_key = records_per_key_;
    options.tls_in_kernel = by_ == By::kKernel;
    return options;
  }

  void Make(const std::string& key, const std::string& other) {
    const int fd = from_[0].get();
    std::thread sender(
        [&] { sent_ = MakeSender(std::move(from_), space_, {}, With(key), &sender_); });
    received_ = MakeReceiver(std::move(to_), space_, {}, With(other), &receiver_);
    sender.join();
    if (!sent_.ok()) return;
    EXPECT_EQ(KernelSends(fd), by_ == By::kKernel);
  }

  // The two ends of a connection without the channel and the relay.
  void MakeStreams(std::unique_ptr<Stream>* client, std::unique_ptr<Stream>* server) {
    auto [from, to] = LoopbackTcpPair();
    std::thread dialer([&, fd = std::move(from)]() mutable {
      sent_ = TlsStream(std::move(fd), Of(TlsRole::kClient), client);
    });
    received_ = TlsStream(std::move(to), Of(TlsRole::kServer), server);
    dialer.join();
    ASSERT_TRUE(sent_.ok() && received_.ok()) << sent_.message() << received_.message();
    ASSERT_EQ(KernelSends((*client)->fd()), by_ == By::kKernel);
  }

  TlsOptions Of(TlsRole role) const {
    return {kKey, role, kPatience, records_per_key_, by_ == By::kKernel};
  }

  // As the kernel says.
  static bool KernelSends(int fd) {
    kernel::CryptoInfo info = {};
    socklen_t size = sizeof(info);
    return ::getsockopt(fd, kernel::kSolTls, kernel::kTlsTx, &info, &size) == 0 &&
           info.version == kernel::kTls13;
  }

  // Sends one message and receives it, until that is done or either side has an error.
  void Move(const std::string& payload, std::string* got) {
    WireHeader header = MakeHeader(MessageType::kData);
    header.payload_bytes = payload.size();
    got->resize(payload.size());
    sender_->Begin(header, {{reinterpret_cast<const std::byte*>(payload.data()), payload.size()}});
    const WireHeader* head = nullptr;
    bool accepted = false;
    Progress sending, receiving;
    const TimePoint deadline = Clock::now() + kPatience;
    while (!receiving.done && sent_.ok() && received_.ok() && Clock::now() < deadline) {
      if (!sending.done) sent_ = sender_->Step(&sending);
      if (head == nullptr) received_ = receiver_->Peek(&head);
      if (head == nullptr || !received_.ok()) continue;
      if (!accepted) receiver_->Accept({{reinterpret_cast<std::byte*>(got->data()), got->size()}});
      accepted = true;
      received_ = receiver_->Step(&receiving);
    }
    done_ = sending.done && receiving.done;
  }

  const By by_;
  uint64_t records_per_key_ = Options().tls_records_per_key;
  device::HostSpace space_;
  std::vector<UniqueFd> from_, to_;
  std::unique_ptr<Relay> relay_;
  std::unique_ptr<Sender> sender_;
  std::unique_ptr<Receiver> receiver_;
  Status sent_, received_;
  bool done_ = false;
};

class Tls : public TlsChannel, public ::testing::WithParamInterface<By> {
 protected:
  Tls() : TlsChannel(GetParam()) {}
};

INSTANTIATE_TEST_SUITE_P(By, Tls, ::testing::Values(By::kOpenSsl, By::kKernel),
                         [](const auto& info) { return NameOf(info.param); });

std::string Text(size_t bytes) {
  std::string pattern;
  for (size_t i = 0; pattern.size() < bytes; ++i) pattern += "gradient " + std::to_string(i) + ";";
  return pattern.substr(0, bytes);
}

TEST_P(Tls, NothingOfAMessageIsOnTheWire) {
  Make(kKey, kKey);
  ASSERT_TRUE(sent_.ok()) << sent_.message();
  ASSERT_TRUE(received_.ok()) << received_.message();
  const std::string payload = Text(300000);
  std::string got;
  Move(payload, &got);
  EXPECT_TRUE(done_ && got == payload);
  const std::string seen = relay_->seen();
  EXPECT_GT(seen.size(), payload.size());
  EXPECT_EQ(seen.find("gradient"), std::string::npos);
  EXPECT_EQ(seen.find("HCCL"), std::string::npos) << "a header";
}

TEST_P(Tls, AFlippedBitIsAnErrorOfBothSidesThatNamesTheLink) {
  Make(kKey, kKey);
  ASSERT_TRUE(sent_.ok() && received_.ok());
  relay_->set_change([](std::string* bytes) { (*bytes)[bytes->size() / 2] ^= 4; });
  std::string got;
  Move(Text(100), &got);
  ASSERT_FALSE(received_.ok());
  EXPECT_EQ(received_.kind(), ErrorKind::kCorrupt);
  for (const char* part : {"stripe 1 of 1", "127.0.0.1:", "bad record mac"}) {
    EXPECT_NE(received_.message().find(part), std::string::npos) << received_.message();
  }
  Progress progress;
  const TimePoint deadline = Clock::now() + kPatience;
  while (sent_.ok() && Clock::now() < deadline) sent_ = sender_->Step(&progress);
  ASSERT_FALSE(sent_.ok()) << "the receiver tells the sender";
  EXPECT_EQ(sent_.kind(), ErrorKind::kCorrupt);
  EXPECT_NE(sent_.message().find("bad record mac"), std::string::npos) << sent_.message();
}

// Type, version and length are not encrypted, and OpenSSL looks at them first.
class TlsHead : public TlsChannel, public ::testing::WithParamInterface<std::tuple<By, size_t>> {
 protected:
  TlsHead() : TlsChannel(std::get<By>(GetParam())) {}
};

TEST_P(TlsHead, AFlippedBitInARecordsHeadIsAnErrorOfBothSidesToo) {
  Make(kKey, kKey);
  ASSERT_TRUE(sent_.ok() && received_.ok());
  relay_->set_change([](std::string* bytes) { (*bytes)[std::get<size_t>(GetParam())] ^= 0x44; });
  std::string got;
  Move(Text(100), &got);
  ASSERT_FALSE(received_.ok());
  EXPECT_EQ(received_.kind(), ErrorKind::kCorrupt);
  EXPECT_NE(received_.message().find("stripe 1 of 1"), std::string::npos) << received_.message();
  Progress progress;
  const TimePoint deadline = Clock::now() + kPatience;
  while (sent_.ok() && Clock::now() < deadline) sent_ = sender_->Step(&progress);
  EXPECT_EQ(sent_.kind(), ErrorKind::kCorrupt) << sent_.message();
}

INSTANTIATE_TEST_SUITE_P(Bytes, TlsHead,
                         ::testing::Combine(::testing::Values(By::kOpenSsl, By::kKernel),
                                            ::testing::Values(0, 1, 3)),
                         [](const auto& info) {
                           return NameOf(std::get<By>(info.param)) +
                                  std::to_string(std::get<size_t>(info.param));
                         });

TEST_P(Tls, AFlippedBitInAnAcknowledgementIsAnErrorOfBothSidesToo) {
  std::unique_ptr<Stream> client, server;
  auto [from, relay_from] = LoopbackTcpPair();
  auto [relay_to, to] = LoopbackTcpPair();
  Relay relay(std::move(relay_to), std::move(relay_from));  // looks at what the server sends
  std::thread dialer([&, fd = std::move(from)]() mutable {
    sent_ = TlsStream(std::move(fd), Of(TlsRole::kClient), &client);
  });
  received_ = TlsStream(std::move(to), Of(TlsRole::kServer), &server);
  dialer.join();
  ASSERT_TRUE(sent_.ok() && received_.ok()) << sent_.message() << received_.message();
  relay.set_change([](std::string* bytes) { bytes->back() ^= 4; });
  ASSERT_EQ(server->Send("a", 1).bytes, 1);
  for (Stream* end : {client.get(), server.get()}) {
    char got;
    const Moved found = Await(end, &got, 1);
    EXPECT_EQ(found.how, Moved::How::kForged);
    EXPECT_NE(found.reason.find("bad record mac"), std::string::npos) << found.reason;
  }
  EXPECT_EQ(client->Send("b", 1).how, Moved::How::kForged) << "nothing moves any more";
}

TEST_P(Tls, KeysAreRenewedUnderWay) {
  records_per_key_ = 2;
  Make(kKey, kKey);
  ASSERT_TRUE(sent_.ok() && received_.ok()) << sent_.message() << received_.message();
  for (const size_t bytes : {10, 100000, 1, 1000000, 50}) {
    const std::string payload = Text(bytes);
    std::string got;
    Move(payload, &got);
    ASSERT_TRUE(done_ && got == payload) << bytes << sent_.message() << received_.message();
  }
}

// Sends until the socket is full; then reads until it is empty, several times.
TEST_P(Tls, AFullSocketDelaysDataAndKeys) {
  records_per_key_ = 2;
  std::unique_ptr<Stream> client, server;
  ASSERT_NO_FATAL_FAILURE(MakeStreams(&client, &server));
  const std::string text = Text(16 << 20);
  std::string got(text.size(), 0);
  size_t sent = 0, received = 0;
  int full = 0;
  while (received < text.size()) {
    while (sent < text.size()) {
      const Moved moved =
          client->Send(text.data() + sent, std::min<size_t>(text.size() - sent, 50000));
      ASSERT_NE(moved.how, Moved::How::kBroken) << moved.reason;
      if (moved.how == Moved::How::kNothing) break;
      sent += moved.bytes;
    }
    if (sent < text.size()) ++full;
    while (received < sent) {
      const Moved moved = Await(server.get(), got.data() + received, got.size() - received);
      ASSERT_EQ(moved.how, Moved::How::kSome) << moved.reason << " at " << received;
      received += moved.bytes;
    }
  }
  EXPECT_GT(full, 0);
  EXPECT_EQ(got, text);
}

// Fills a socket with room for about so many bytes, ends it, and lets the other end read it all.
void FillAndEnd(Stream* client, Stream* server, int room) {
  ASSERT_EQ(::setsockopt(client->fd(), SOL_SOCKET, SO_SNDBUF, &room, sizeof(room)), 0);
  const std::string text = Text(1 << 20);
  size_t sent = 0, received = 0;
  while (true) {
    const size_t at = sent % text.size();
    const Moved moved = client->Send(text.data() + at, text.size() - at);
    if (moved.how == Moved::How::kNothing) break;
    ASSERT_EQ(moved.how, Moved::How::kSome) << moved.reason;
    sent += moved.bytes;
  }
  client->EndSending();
  EXPECT_FALSE(client->Drained());
  std::string got(text.size(), 0);
  const TimePoint deadline = Clock::now() + kPatience;
  Moved moved;
  while (Clock::now() < deadline) {
    (void)client->Drained();
    const size_t at = received % text.size();
    moved = server->Receive(got.data(), text.size() - at);
    if (moved.how == Moved::How::kNothing) continue;
    if (moved.how != Moved::How::kSome) break;
    ASSERT_EQ(got.compare(0, moved.bytes, text, at, moved.bytes), 0) << "at " << received;
    received += moved.bytes;
  }
  EXPECT_EQ(moved.how, Moved::How::kEnd) << moved.reason;
  EXPECT_EQ(received, sent);
  bool drained = false;  // the peer's kernel may take its time to tell
  while (!drained && Clock::now() < deadline) drained = client->Drained();
  EXPECT_TRUE(drained);
}

TEST_P(Tls, TheEndOfAFullSocketComesBehindItsData) {
  // Where the room ends in a record, the kernel keeps the rest of that.
  for (int room = 100000; room < 200000; room += 7000) {
    std::unique_ptr<Stream> client, server;
    ASSERT_NO_FATAL_FAILURE(MakeStreams(&client, &server));
    FillAndEnd(client.get(), server.get(), room);
    if (HasFailure()) FAIL() << "with room for " << room << " bytes";
  }
}

TEST_P(Tls, APeerThatIsGoneIsAnErrorOfSending) {
  std::unique_ptr<Stream> client, server;
  ASSERT_NO_FATAL_FAILURE(MakeStreams(&client, &server));
  ASSERT_EQ(server->Send("a", 1).bytes, 1);
  char got;
  ASSERT_EQ(Await(client.get(), &got, 1).bytes, 1);
  server.reset();
  const std::string text(100000, 'd');
  const TimePoint deadline = Clock::now() + kPatience;
  Moved moved;
  while (moved.how != Moved::How::kBroken && Clock::now() < deadline) {
    moved = client->Send(text.data(), text.size());
  }
  EXPECT_NE(moved.reason.find("sending to it failed: "), std::string::npos) << moved.reason;
}

TEST_P(Tls, RepeatedBytesAreAnError) {
  Make(kKey, kKey);
  ASSERT_TRUE(sent_.ok() && received_.ok());
  std::string got;
  relay_->set_change([](std::string* bytes) { *bytes += *bytes; });
  Move(Text(100), &got);
  if (received_.ok()) Move(Text(100), &got);
  ASSERT_FALSE(received_.ok());
  EXPECT_EQ(received_.kind(), ErrorKind::kCorrupt);
}

TEST_P(Tls, AnotherKeyIsRefusedByBoth) {
  Make(kKey, std::string(kTlsKeyBytes, 'x'));
  ASSERT_FALSE(sent_.ok());
  ASSERT_FALSE(received_.ok());
  for (const Status& status : {sent_, received_}) {
    for (const char* part : {"TLS from 127.0.0.1:", "the handshake failed: "}) {
      EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    }
  }
}

TEST_P(Tls, AKeyOfAnotherSizeIsRefused) {
  Make("short", kKey);
  ASSERT_FALSE(sent_.ok());
  EXPECT_NE(sent_.message().find("5 bytes instead of 32"), std::string::npos) << sent_.message();
  ASSERT_FALSE(received_.ok());  // the other's socket is closed
  EXPECT_NE(received_.message().find("closed the connection"), std::string::npos)
      << received_.message();
}

TEST_P(Tls, APeerWithoutTlsIsRefused) {
  from_.clear();
  auto [plain, ours] = LoopbackTcpPair();
  const std::string header(200, 'H');
  ASSERT_EQ(::send(plain.get(), header.data(), header.size(), 0), 200);
  std::vector<UniqueFd> sockets;
  sockets.push_back(std::move(ours));
  const Status status = MakeReceiver(std::move(sockets), space_, {}, With(kKey), &receiver_);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("the handshake failed"), std::string::npos) << status.message();
}

TEST_P(Tls, ASilentPeerIsWaitedForNoLongerThanAsked) {
  auto [silent, ours] = LoopbackTcpPair();
  std::vector<UniqueFd> sockets;
  sockets.push_back(std::move(ours));
  Options options = With(kKey);
  options.patience = std::chrono::milliseconds(100);
  const TimePoint begin = Clock::now();
  const Status status = MakeSender(std::move(sockets), space_, {}, options, &sender_);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("no handshake within 0.1"), std::string::npos)
      << status.message();
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));
}

TEST_P(Tls, AllSocketsTogetherAreWaitedForNoLongerThanAsked) {
  auto [silent, second] = LoopbackTcpPair();
  Options options = With(kKey);
  options.tls_keys.push_back(kKey);
  options.patience = std::chrono::seconds(1);
  from_.push_back(std::move(second));
  std::unique_ptr<Stream> first;
  std::thread peer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    received_ = TlsStream(std::move(to_[0]), Of(TlsRole::kServer), &first);
  });
  sent_ = MakeSender(std::move(from_), space_, {}, options, &sender_);
  peer.join();
  EXPECT_TRUE(received_.ok()) << received_.message();
  ASSERT_FALSE(sent_.ok());
  EXPECT_NE(sent_.message().find("no handshake within 0."), std::string::npos) << sent_.message();
}

TEST_P(Tls, NobodyWaitsForThePeersSlots) {
  HeldSpace held;
  std::thread receiver(
      [&] { received_ = MakeReceiver(std::move(to_), held, {}, With(kKey), &receiver_); });
  sent_ = MakeSender(std::move(from_), space_, {}, With(kKey), &sender_);
  held.LetGo();
  receiver.join();
  EXPECT_TRUE(sent_.ok()) << sent_.message();
  EXPECT_TRUE(received_.ok()) << received_.message();
  receiver_.reset();  // before the space
}

TEST_P(Tls, AResetInTheHandshakeStillNamesTheLink) {
  auto [ours, theirs] = LoopbackTcpPair();
  std::thread peer([fd = std::move(theirs)]() mutable {
    char hello = 0;
    EXPECT_EQ(::recv(fd.get(), &hello, 1, 0), 1);
    SetReset(fd.get());
    fd.reset();
  });
  std::vector<UniqueFd> sockets;
  sockets.push_back(std::move(ours));
  const Status status = MakeSender(std::move(sockets), space_, {}, With(kKey), &sender_);
  peer.join();
  ASSERT_FALSE(status.ok());
  for (const char* part : {"TLS from 127.0.0.1:", "reset by peer"}) {
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }
}

TEST_P(Tls, AResetBehindDataIsFoundByTheNextCall) {
  std::unique_ptr<Stream> client, server;
  ASSERT_NO_FATAL_FAILURE(MakeStreams(&client, &server));
  ASSERT_EQ(client->Send("last", 4).bytes, 4);
  pollfd arrived = {server->fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&arrived, 1, 20000), 1);
  SetReset(client->fd());
  client.reset();
  char got[16];
  const Moved first = server->Receive(got, sizeof(got));
  ASSERT_EQ(first.how, Moved::How::kSome) << first.reason;
  EXPECT_EQ(std::string(got, first.bytes), "last");
  for (int i = 0; i < 2; ++i) {
    const Moved next = server->Receive(got, sizeof(got));
    EXPECT_EQ(next.how, Moved::How::kBroken);
    EXPECT_NE(next.reason.find("reset by peer"), std::string::npos) << next.reason;
  }
}

TEST_P(Tls, EachSocketNeedsAKey) {
  auto [more, unused] = LoopbackTcpPair();
  from_.push_back(std::move(more));
  const Status status = MakeSender(std::move(from_), space_, {}, With(kKey), &sender_);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("2 sockets has 1 TLS keys"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace hetccl::transport::tcp
