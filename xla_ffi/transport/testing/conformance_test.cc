// What every transport must do, checked for all of them.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/device/host_space.h"
#include "xla_ffi/transport/rdma/factory.h"
#include "xla_ffi/transport/rdma/test_ports.h"
#include "xla_ffi/transport/shm/factory.h"
#include "xla_ffi/transport/span_cursor.h"
#include "xla_ffi/transport/tcp/factory.h"
#include "xla_ffi/transport/testing/loopback.h"
#include "xla_ffi/transport/testing/tcp_pair.h"

namespace hetccl::transport {
namespace {

using testing::Faults;
using testing::LoopbackTcpPair;
using testing::Pair;

device::Space& Host() {
  static auto* space = new device::HostSpace();
  return *space;
}

constexpr auto kPatience = std::chrono::seconds(20);

std::pair<UniqueFd, UniqueFd> UnixPair() {
  int fds[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

Pair TcpPair(int sockets, std::pair<UniqueFd, UniqueFd> (*connect)(),
             const tcp::Options& options = {}) {
  std::vector<UniqueFd> left, right;
  for (int i = 0; i < sockets; ++i) {
    auto [a, b] = connect();
    left.push_back(std::move(a));
    right.push_back(std::move(b));
  }
  Pair pair;
  // With TLS each end waits for the other.
  Status sent;
  std::thread sender([&, from = &left] {
    sent = tcp::MakeSender(std::move(*from), Host(), {}, options, &pair.sender);
  });
  const Status received = tcp::MakeReceiver(std::move(right), Host(), {}, options, &pair.receiver);
  sender.join();
  EXPECT_TRUE(sent.ok()) << sent.message();
  EXPECT_TRUE(received.ok()) << received.message();
  return pair;
}

tcp::Options Tls(int sockets, bool checksum = false) {
  tcp::Options options;
  options.checksum = checksum;
  for (int i = 0; i < sockets; ++i) {
    options.tls_keys.emplace_back(tcp::kTlsKeyBytes, static_cast<char>('a' + i));
  }
  return options;
}

// A key is replaced after every few records.
tcp::Options TlsOfManyKeys() {
  tcp::Options options = Tls(1);
  options.tls_records_per_key = 3;
  return options;
}

Pair ShmPair(uint32_t slot_bytes, uint32_t slots) {
  UniqueFd memfd;
  EXPECT_TRUE(shm::MakeSegment(slot_bytes, slots, &memfd).ok());
  auto [a, b] = UnixPair();
  std::vector<UniqueFd> left, right;
  left.push_back(std::move(a));
  right.push_back(std::move(b));
  left.emplace_back(::dup(memfd.get()));
  right.push_back(std::move(memfd));
  Pair pair;
  EXPECT_TRUE(shm::MakeSender(std::move(left), Host(), &pair.sender).ok());
  EXPECT_TRUE(shm::MakeReceiver(std::move(right), Host(), &pair.receiver).ok());
  return pair;
}

Pair RdmaPair(const Staging& staging, bool on_demand_paging = false) {
  std::string why_not;
  std::vector<rdma::Options> ends = rdma::TestPorts(&why_not);
  if (ends.empty()) return {};
  for (rdma::Options& end : ends) end.on_demand_paging = on_demand_paging;
  auto [a, b] = UnixPair();
  std::vector<UniqueFd> left, right;
  left.push_back(std::move(a));
  right.push_back(std::move(b));
  Pair pair;
  Status sent;
  std::thread sender([&, sockets = &left] {
    sent = rdma::MakeSender(std::move(*sockets), Host(), staging, ends[0], &pair.sender);
  });
  const Status received =
      rdma::MakeReceiver(std::move(right), Host(), staging, ends[1], &pair.receiver);
  sender.join();
  EXPECT_TRUE(sent.ok()) << sent.message();
  EXPECT_TRUE(received.ok()) << received.message();
  return pair;
}

Faults ShortSteps() {
  Faults faults;
  faults.max_step_bytes = 7;
  return faults;
}

Faults Delays() {
  Faults faults;
  faults.max_step_bytes = 20000;
  faults.delay = std::chrono::microseconds(200);
  return faults;
}

struct Transport {
  friend std::ostream& operator<<(std::ostream& out, const Transport& transport) {
    return out << transport.name;
  }

  std::string name;
  std::function<Pair()> make;
  size_t large;  // a payload that fits into no buffer on the way and does not take long
};

const std::vector<Transport>& Transports() {
  static const auto* all = new std::vector<Transport>{
      {"tcp1", [] { return TcpPair(1, LoopbackTcpPair); }, 30 << 20},
      {"tcp2", [] { return TcpPair(2, LoopbackTcpPair); }, 60 << 20},
      {"tcp3", [] { return TcpPair(3, LoopbackTcpPair); }, 80 << 20},
      {"tcp1_checked", [] { return TcpPair(1, LoopbackTcpPair, {true}); }, 30 << 20},
      {"tcp3_checked", [] { return TcpPair(3, LoopbackTcpPair, {true}); }, 80 << 20},
      {"tls1", [] { return TcpPair(1, LoopbackTcpPair, Tls(1)); }, 30 << 20},
      {"tls3_checked", [] { return TcpPair(3, LoopbackTcpPair, Tls(3, true)); }, 80 << 20},
      {"tls1_many_keys", [] { return TcpPair(1, LoopbackTcpPair, TlsOfManyKeys()); }, 30 << 20},
      {"tls_unix", [] { return TcpPair(1, UnixPair, Tls(1)); }, 5 << 20},
      {"tls_many_keys", [] { return TcpPair(1, UnixPair, TlsOfManyKeys()); }, 5 << 20},
      {"unix", [] { return TcpPair(1, UnixPair); }, 5 << 20},
      {"shm", [] { return ShmPair(shm::kDefaultSlotBytes, shm::kDefaultSlots); }, 20 << 20},
      {"shm_large_slots", [] { return ShmPair(shm::kGpuSlotBytes, shm::kGpuSlots); }, 60 << 20},
      {"shm_small_slots", [] { return ShmPair(4096, 2); }, 3 << 20},
      {"rdma", [] { return RdmaPair({}); }, 20 << 20},
      {"rdma_small_slots", [] { return RdmaPair({4096, 2}); }, 3 << 20},
      {"rdma_on_demand_paging", [] { return RdmaPair({}, true); }, 20 << 20},
      {"loopback", [] { return testing::MakeLoopback(); }, 3 << 20},
      {"short_steps", [] { return testing::MakeFaulty(ShortSteps()); }, 100 << 10},
      {"delays", [] { return testing::MakeFaulty(Delays()); }, 1 << 20},
  };
  return *all;
}

class Conformance : public ::testing::TestWithParam<Transport> {
 protected:
  Conformance() : pair_(GetParam().make()) {}

  void SetUp() override {
    if (pair_.sender != nullptr || GetParam().name.rfind("rdma", 0) != 0) return;
    std::string why_not;
    if (rdma::TestPorts(&why_not).empty()) GTEST_SKIP() << why_not;
    FAIL() << "no channel";
  }

  static WireHeader Header(uint64_t number, uint64_t bytes) {
    WireHeader header = MakeHeader(MessageType::kData);
    header.epoch = 0xE;
    header.occurrence = number;
    header.payload_bytes = bytes;
    SetText(&header, "message " + std::to_string(number));
    return header;
  }

  // Bytes that differ at every position and for every message.
  static std::vector<std::byte> Bytes(size_t size, uint64_t seed) {
    std::vector<std::byte> bytes(size);
    uint64_t state = seed * 2654435761u + 1;
    for (size_t at = 0; at < size; at += sizeof(state)) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const uint64_t mixed = state ^ state >> 29;
      std::memcpy(&bytes[at], &mixed, std::min(sizeof(mixed), size - at));
    }
    return bytes;
  }

  // Vectors of std::byte compare byte by byte, which was half of the time under ThreadSanitizer.
  static bool Same(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
  }

  // Sends until done, as a proxy thread would.
  void SendAll(uint64_t number, const std::vector<std::byte>& bytes) {
    pair_.sender->Begin(Header(number, bytes.size()), {{bytes.data(), bytes.size()}});
    StepSenderUntilDone(bytes.size());
  }

  void StepSenderUntilDone(size_t bytes) {
    Progress progress;
    size_t moved = 0;
    const TimePoint deadline = Clock::now() + kPatience;
    while (!progress.done && Clock::now() < deadline) {
      ASSERT_TRUE(pair_.sender->Step(&progress).ok());
      moved += progress.bytes;
      ASSERT_EQ(pair_.sender->peer(), PeerState::kAlive) << pair_.sender->lost_reason();
    }
    EXPECT_TRUE(progress.done);
    EXPECT_EQ(moved, bytes);
  }

  const WireHeader* WaitHeader() {
    const WireHeader* header = nullptr;
    const TimePoint deadline = Clock::now() + kPatience;
    while (header == nullptr && Clock::now() < deadline) {
      EXPECT_TRUE(pair_.receiver->Peek(&header).ok());
      if (pair_.receiver->peer() != PeerState::kAlive) break;
    }
    return header;
  }

  // For transports whose single step does not carry a whole header.
  const WireHeader* WaitHeaderWhileSending() {
    const WireHeader* header = nullptr;
    Progress progress;
    const TimePoint deadline = Clock::now() + kPatience;
    while (header == nullptr && Clock::now() < deadline) {
      EXPECT_TRUE(pair_.sender->Step(&progress).ok());
      EXPECT_TRUE(pair_.receiver->Peek(&header).ok());
    }
    return header;
  }

  // Fails the test if nothing becomes ready for long.
  static void SleepOn(const std::vector<int>& fds) {
    std::vector<pollfd> polled;
    for (int fd : fds) polled.push_back({fd, POLLIN, 0});
    EXPECT_GT(::poll(polled.data(), polled.size(), 5000), 0) << "nobody woke the sleeper";
  }

  void ReceiveInto(uint64_t number, MutablePayload payload) {
    const WireHeader* header = WaitHeader();
    ASSERT_NE(header, nullptr);
    EXPECT_EQ(header->occurrence, number);
    EXPECT_EQ(Text(*header), "message " + std::to_string(number));
    const size_t size = TotalSize(payload);
    ASSERT_EQ(header->payload_bytes, size);
    pair_.receiver->Accept(std::move(payload));
    Progress progress;
    size_t moved = 0;
    const TimePoint deadline = Clock::now() + kPatience;
    while (!progress.done && Clock::now() < deadline) {
      ASSERT_TRUE(pair_.receiver->Step(&progress).ok());
      moved += progress.bytes;
    }
    EXPECT_TRUE(progress.done);
    EXPECT_EQ(moved, size);
  }

  std::vector<std::byte> Receive(uint64_t number, size_t size) {
    std::vector<std::byte> bytes(size, std::byte{0xEE});
    ReceiveInto(number, {{bytes.data(), bytes.size()}});
    return bytes;
  }

  // Lets a half notice what became ready, as a proxy thread would.
  template <typename Half>
  PeerState WaitForEnd(Half& half, const std::function<void()>& step) {
    const TimePoint deadline = Clock::now() + std::chrono::seconds(1);
    while (half.peer() == PeerState::kAlive && Clock::now() < deadline) {
      half.OnReady();
      step();
    }
    return half.peer();
  }
  PeerState SenderNotices() {
    return WaitForEnd(*pair_.sender, [&] {
      Progress progress;
      EXPECT_TRUE(pair_.sender->Step(&progress).ok());
    });
  }
  PeerState ReceiverNotices() {
    return WaitForEnd(*pair_.receiver, [&] {
      const WireHeader* header = nullptr;
      EXPECT_TRUE(pair_.receiver->Peek(&header).ok());
      EXPECT_EQ(header, nullptr);
    });
  }

  Pair pair_;
};

TEST_P(Conformance, MovesMessagesOfAllSizesInOrder) {
  const std::vector<size_t> sizes = {0,     1,      63,     64,      4096,    65536,
                                     65537, 262144, 262145, 1000003, 5000001, 5};
  std::thread sender([&] {
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] <= GetParam().large) SendAll(i, Bytes(sizes[i], i));
    }
  });
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] <= GetParam().large) {
      EXPECT_TRUE(Same(Receive(i, sizes[i]), Bytes(sizes[i], i))) << "size " << sizes[i];
    }
  }
  sender.join();
}

TEST_P(Conformance, MovesOneMessageOnOneThread) {
  const std::vector<std::byte> sent = Bytes(std::min<size_t>(GetParam().large, 5 << 20), 3);
  std::vector<std::byte> received(sent.size());
  pair_.sender->Begin(Header(0, sent.size()), {{sent.data(), sent.size()}});
  Progress out, in;
  const WireHeader* header = nullptr;
  bool accepted = false;
  const TimePoint deadline = Clock::now() + kPatience;
  // Either may be done first: a NIC tells the sender after the receiver.
  while (!(in.done && out.done) && Clock::now() < deadline) {
    if (!out.done) {
      ASSERT_TRUE(pair_.sender->Step(&out).ok());
    }
    if (in.done) continue;
    if (!accepted) {
      ASSERT_TRUE(pair_.receiver->Peek(&header).ok());
      if (header == nullptr) continue;
      pair_.receiver->Accept({{received.data(), received.size()}});
      accepted = true;
    }
    ASSERT_TRUE(pair_.receiver->Step(&in).ok());
  }
  EXPECT_TRUE(out.done);
  EXPECT_TRUE(in.done);
  EXPECT_TRUE(Same(sent, received));
}

TEST_P(Conformance, GathersAndScattersSpans) {
  const size_t size = std::min<size_t>(GetParam().large, 600000);
  const std::vector<std::byte> bytes = Bytes(size, 9);
  // Cut differently on the two sides, with empty spans between.
  ConstPayload out;
  for (size_t at = 0, step = 1; at < size; at += step, step = step * 3 + 1) {
    out.push_back({bytes.data() + at, std::min(step, size - at)});
    out.push_back({bytes.data(), 0});
  }
  std::vector<std::byte> received(size);
  MutablePayload in;
  for (size_t at = 0; at < size; at += 44444) {
    in.push_back({received.data() + at, std::min<size_t>(44444, size - at)});
  }
  std::thread sender([&] {
    pair_.sender->Begin(Header(0, size), out);
    StepSenderUntilDone(size);
  });
  ReceiveInto(0, in);
  sender.join();
  EXPECT_TRUE(Same(received, bytes));
}

TEST_P(Conformance, MessageWaitsUntilItIsAccepted) {
  const std::vector<std::byte> bytes = Bytes(GetParam().large, 1);
  pair_.sender->Begin(Header(0, bytes.size()), {{bytes.data(), bytes.size()}});
  Progress progress;
  for (int i = 0; i < 2000; ++i) {
    ASSERT_TRUE(pair_.sender->Step(&progress).ok());
    ASSERT_FALSE(progress.done) << "a payload that large cannot be under way as a whole";
  }
  EXPECT_FALSE(pair_.sender->peer_has_begun());
  // Copies of other threads may still be under way.
  const WireHeader* header = WaitHeaderWhileSending();
  ASSERT_NE(header, nullptr);
  const WireHeader* again = nullptr;
  ASSERT_TRUE(pair_.receiver->Peek(&again).ok());
  EXPECT_EQ(header, again);
  std::vector<std::byte> received(bytes.size());
  pair_.receiver->Accept({{received.data(), received.size()}});
  Progress in;
  ASSERT_TRUE(pair_.receiver->Step(&in).ok());
  const TimePoint deadline = Clock::now() + kPatience;
  while (!pair_.sender->peer_has_begun() && !progress.done && Clock::now() < deadline) {
    if (in.copying) {
      ASSERT_TRUE(pair_.receiver->Step(&in).ok());
    }
    ASSERT_TRUE(pair_.sender->Step(&progress).ok());
  }
  EXPECT_TRUE(pair_.sender->peer_has_begun());
  while (!in.done && Clock::now() < deadline) {
    if (!progress.done) {
      ASSERT_TRUE(pair_.sender->Step(&progress).ok());
    }
    ASSERT_TRUE(pair_.receiver->Step(&in).ok());
  }
  EXPECT_TRUE(Same(received, bytes));
}

TEST_P(Conformance, NoticesTheLossOfTheReceiver) {
  pair_.receiver.reset();
  EXPECT_EQ(SenderNotices(), PeerState::kLost);
  EXPECT_NE(pair_.sender->lost_reason(), "");
}

TEST_P(Conformance, NoticesTheLossOfTheSender) {
  pair_.sender.reset();
  EXPECT_EQ(ReceiverNotices(), PeerState::kLost);
  EXPECT_NE(pair_.receiver->lost_reason(), "");
}

TEST_P(Conformance, NoticesALossInTheMiddleOfAMessage) {
  const std::vector<std::byte> bytes = Bytes(GetParam().large, 1);
  pair_.sender->Begin(Header(0, bytes.size()), {{bytes.data(), bytes.size()}});
  Progress progress;
  ASSERT_TRUE(pair_.sender->Step(&progress).ok());
  ASSERT_NE(WaitHeaderWhileSending(), nullptr);
  std::vector<std::byte> received(bytes.size());
  pair_.receiver->Accept({{received.data(), received.size()}});
  ASSERT_TRUE(pair_.receiver->Step(&progress).ok());
  pair_.sender.reset();
  const PeerState state = WaitForEnd(*pair_.receiver, [&] {
    Progress last;
    EXPECT_TRUE(pair_.receiver->Step(&last).ok());
    EXPECT_FALSE(last.done);
  });
  EXPECT_EQ(state, PeerState::kLost);
}

TEST_P(Conformance, SenderSaysGoodbyeAfterItsMessages) {
  const std::vector<std::byte> bytes = Bytes(2000, 4);
  SendAll(0, bytes);
  pair_.sender->SayGoodbye();
  const TimePoint deadline = Clock::now() + std::chrono::seconds(1);
  while (!pair_.sender->Drained() && Clock::now() < deadline) std::this_thread::yield();
  EXPECT_TRUE(pair_.sender->Drained());
  pair_.sender.reset();
  EXPECT_TRUE(Same(Receive(0, 2000), bytes));
  EXPECT_EQ(ReceiverNotices(), PeerState::kGoodbye);
}

TEST_P(Conformance, ReceiverSaysGoodbye) {
  SendAll(0, Bytes(100, 4));
  Receive(0, 100);
  pair_.receiver->SayGoodbye();
  pair_.receiver.reset();
  EXPECT_EQ(SenderNotices(), PeerState::kGoodbye);
}

TEST_P(Conformance, SleepersAreWoken) {
  // The receiver sleeps on its descriptors before anything was sent, and wakes for every message.
  constexpr int kMessages = 20;
  std::thread sender([&] {
    for (int i = 0; i < kMessages; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      SendAll(i, Bytes(5000, i));
    }
  });
  for (int i = 0; i < kMessages; ++i) {
    const WireHeader* header = nullptr;
    const TimePoint deadline = Clock::now() + kPatience;
    while (Clock::now() < deadline) {
      ASSERT_TRUE(pair_.receiver->Peek(&header).ok());
      if (header != nullptr) break;
      if (!pair_.receiver->ArmDoorbell()) SleepOn(pair_.receiver->poll_fds());
      pair_.receiver->OnReady();
    }
    EXPECT_TRUE(Same(Receive(i, 5000), Bytes(5000, i)));
  }
  sender.join();
}

INSTANTIATE_TEST_SUITE_P(AllTransports, Conformance, ::testing::ValuesIn(Transports()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace hetccl::transport
