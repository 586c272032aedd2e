#include "xla_ffi/transport/tcp/tls.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
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
#include <utility>
#include <vector>

#include "xla_ffi/device/host_space.h"
#include "xla_ffi/transport/tcp/factory.h"

namespace hetccl::transport::tcp {
namespace {

const std::string kKey(kTlsKeyBytes, 'k');
constexpr auto kPatience = std::chrono::seconds(20);

// Over TCP, so that there are names.
std::pair<UniqueFd, UniqueFd> Connected() {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* any = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(listener.get(), any, size), 0);
  EXPECT_EQ(::listen(listener.get(), 1), 0);
  EXPECT_EQ(::getsockname(listener.get(), any, &size), 0);
  UniqueFd client(::socket(AF_INET, SOCK_STREAM, 0));
  EXPECT_EQ(::connect(client.get(), any, size), 0);
  UniqueFd server(::accept(listener.get(), nullptr, nullptr));
  return {std::move(client), std::move(server)};
}

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

// A channel of one socket through a relay.
class Tls : public ::testing::Test {
 protected:
  Tls() {
    auto [from, relay_from] = Connected();
    auto [to, relay_to] = Connected();
    from_.push_back(std::move(from));
    to_.push_back(std::move(to));
    relay_ = std::make_unique<Relay>(std::move(relay_from), std::move(relay_to));
  }

  static Options With(const std::string& key) {
    Options options;
    options.tls_keys = {key};
    options.patience = kPatience;
    return options;
  }

  void Make(const std::string& key, const std::string& other) {
    std::thread sender(
        [&] { sent_ = MakeSender(std::move(from_), space_, {}, With(key), &sender_); });
    received_ = MakeReceiver(std::move(to_), space_, {}, With(other), &receiver_);
    sender.join();
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

  device::HostSpace space_;
  std::vector<UniqueFd> from_, to_;
  std::unique_ptr<Relay> relay_;
  std::unique_ptr<Sender> sender_;
  std::unique_ptr<Receiver> receiver_;
  Status sent_, received_;
  bool done_ = false;
};

std::string Pattern(size_t bytes) {
  std::string pattern;
  for (size_t i = 0; pattern.size() < bytes; ++i) pattern += "gradient " + std::to_string(i) + ";";
  return pattern.substr(0, bytes);
}

TEST_F(Tls, NothingOfAMessageIsOnTheWire) {
  Make(kKey, kKey);
  ASSERT_TRUE(sent_.ok()) << sent_.message();
  ASSERT_TRUE(received_.ok()) << received_.message();
  const std::string payload = Pattern(300000);
  std::string got;
  Move(payload, &got);
  EXPECT_TRUE(done_ && got == payload);
  const std::string seen = relay_->seen();
  EXPECT_GT(seen.size(), payload.size());
  EXPECT_EQ(seen.find("gradient"), std::string::npos);
  EXPECT_EQ(seen.find("HCCL"), std::string::npos) << "a header";
}

TEST_F(Tls, AFlippedBitIsAnErrorOfBothSidesThatNamesTheLink) {
  Make(kKey, kKey);
  ASSERT_TRUE(sent_.ok() && received_.ok());
  relay_->set_change([](std::string* bytes) { (*bytes)[bytes->size() / 2] ^= 4; });
  std::string got;
  Move(Pattern(100), &got);
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
class TlsHead : public Tls, public ::testing::WithParamInterface<size_t> {};

TEST_P(TlsHead, AFlippedBitInARecordsHeadIsAnErrorOfBothSidesToo) {
  Make(kKey, kKey);
  ASSERT_TRUE(sent_.ok() && received_.ok());
  relay_->set_change([](std::string* bytes) { (*bytes)[GetParam()] ^= 0x44; });
  std::string got;
  Move(Pattern(100), &got);
  ASSERT_FALSE(received_.ok());
  EXPECT_EQ(received_.kind(), ErrorKind::kCorrupt);
  EXPECT_NE(received_.message().find("stripe 1 of 1"), std::string::npos) << received_.message();
  Progress progress;
  const TimePoint deadline = Clock::now() + kPatience;
  while (sent_.ok() && Clock::now() < deadline) sent_ = sender_->Step(&progress);
  EXPECT_EQ(sent_.kind(), ErrorKind::kCorrupt) << sent_.message();
}

INSTANTIATE_TEST_SUITE_P(Bytes, TlsHead, ::testing::Values(0, 1, 3));

TEST_F(Tls, RepeatedBytesAreAnError) {
  Make(kKey, kKey);
  ASSERT_TRUE(sent_.ok() && received_.ok());
  std::string got;
  relay_->set_change([](std::string* bytes) { *bytes += *bytes; });
  Move(Pattern(100), &got);
  if (received_.ok()) Move(Pattern(100), &got);
  ASSERT_FALSE(received_.ok());
  EXPECT_EQ(received_.kind(), ErrorKind::kCorrupt);
}

TEST_F(Tls, AnotherKeyIsRefusedByBoth) {
  Make(kKey, std::string(kTlsKeyBytes, 'x'));
  ASSERT_FALSE(sent_.ok());
  ASSERT_FALSE(received_.ok());
  for (const Status& status : {sent_, received_}) {
    for (const char* part : {"TLS from 127.0.0.1:", "the handshake failed: "}) {
      EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    }
  }
}

TEST_F(Tls, AKeyOfAnotherSizeIsRefused) {
  Make("short", kKey);
  ASSERT_FALSE(sent_.ok());
  EXPECT_NE(sent_.message().find("5 bytes instead of 32"), std::string::npos) << sent_.message();
  ASSERT_FALSE(received_.ok());  // the other's socket is closed
  EXPECT_NE(received_.message().find("closed the connection"), std::string::npos)
      << received_.message();
}

TEST_F(Tls, APeerWithoutTlsIsRefused) {
  from_.clear();
  auto [plain, ours] = Connected();
  const std::string header(200, 'H');
  ASSERT_EQ(::send(plain.get(), header.data(), header.size(), 0), 200);
  std::vector<UniqueFd> sockets;
  sockets.push_back(std::move(ours));
  const Status status = MakeReceiver(std::move(sockets), space_, {}, With(kKey), &receiver_);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("the handshake failed"), std::string::npos) << status.message();
}

TEST_F(Tls, ASilentPeerIsWaitedForNoLongerThanAsked) {
  auto [silent, ours] = Connected();
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

TEST_F(Tls, AllSocketsTogetherAreWaitedForNoLongerThanAsked) {
  auto [silent, second] = Connected();
  Options options = With(kKey);
  options.tls_keys.push_back(kKey);
  options.patience = std::chrono::seconds(1);
  from_.push_back(std::move(second));
  std::unique_ptr<Stream> first;
  std::thread peer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const TlsOptions tls = {kKey, TlsRole::kServer, kPatience, options.tls_records_per_key};
    received_ = TlsStream(std::move(to_[0]), tls, &first);
  });
  sent_ = MakeSender(std::move(from_), space_, {}, options, &sender_);
  peer.join();
  EXPECT_TRUE(received_.ok()) << received_.message();
  ASSERT_FALSE(sent_.ok());
  EXPECT_NE(sent_.message().find("no handshake within 0."), std::string::npos) << sent_.message();
}

TEST_F(Tls, NobodyWaitsForThePeersSlots) {
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

TEST_F(Tls, AResetInTheHandshakeStillNamesTheLink) {
  auto [ours, theirs] = Connected();
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

TEST_F(Tls, AResetBehindDataIsFoundByTheNextCall) {
  auto [from, to] = Connected();
  std::unique_ptr<Stream> client, server;
  const Options defaults;
  std::thread dialer([&, fd = std::move(from)]() mutable {
    const TlsOptions tls = {kKey, TlsRole::kClient, kPatience, defaults.tls_records_per_key};
    sent_ = TlsStream(std::move(fd), tls, &client);
  });
  const TlsOptions tls = {kKey, TlsRole::kServer, kPatience, defaults.tls_records_per_key};
  received_ = TlsStream(std::move(to), tls, &server);
  dialer.join();
  ASSERT_TRUE(sent_.ok() && received_.ok()) << sent_.message() << received_.message();
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

TEST_F(Tls, EachSocketNeedsAKey) {
  auto [more, unused] = Connected();
  from_.push_back(std::move(more));
  const Status status = MakeSender(std::move(from_), space_, {}, With(kKey), &sender_);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("2 sockets has 1 TLS keys"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace hetccl::transport::tcp
