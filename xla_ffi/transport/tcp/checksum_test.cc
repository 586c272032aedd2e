// A wire that flips one bit between a sender and a receiver.
#include "xla_ffi/transport/tcp/checksum.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "xla_ffi/device/host_space.h"
#include "xla_ffi/transport/tcp/factory.h"
#include "xla_ffi/transport/tcp/lanes.h"

namespace hetccl::transport::tcp {
namespace {

// Where the wire flips a bit: counted in all bytes that pass on this socket.
struct Flip {
  size_t lane;
  size_t byte;
  int bit;
};

// Both halves, and between them sockets whose bytes this passes on.
class Wire {
 public:
  Wire(size_t lanes, bool checksum, std::optional<Flip> flip) : flip_(flip), passed_(lanes) {
    std::vector<UniqueFd> from, to;
    for (size_t i = 0; i < lanes; ++i) {
      Connect(&from, &out_);
      Connect(&to, &in_);
    }
    EXPECT_TRUE(MakeSender(std::move(from), space_, {}, {checksum}, &sender).ok());
    EXPECT_TRUE(MakeReceiver(std::move(to), space_, {}, {checksum}, &receiver).ok());
  }

  void PassOn() {
    for (size_t lane = 0; lane < out_.size(); ++lane) {
      std::vector<char> bytes(30000);  // odd pieces
      const ssize_t count = ::recv(out_[lane].get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (count <= 0) continue;
      if (flip_ && flip_->lane == lane &&
          flip_->byte - passed_[lane] < static_cast<size_t>(count)) {
        bytes[flip_->byte - passed_[lane]] ^= static_cast<char>(1 << flip_->bit);
      }
      passed_[lane] += count;
      EXPECT_EQ(::send(in_[lane].get(), bytes.data(), count, 0), count);
    }
  }

  // Moves one message of these bytes; returns how the receiver ends, and what it got.
  Status Move(const std::vector<std::byte>& sent, std::vector<std::byte>* received) {
    WireHeader header = MakeHeader(MessageType::kData);
    header.payload_bytes = sent.size();
    sender->Begin(header, {{sent.data(), sent.size() / 3},
                           {sent.data() + sent.size() / 3, sent.size() - sent.size() / 3}});
    received->assign(sent.size(), std::byte{0});
    bool sending = true;
    const WireHeader* head = nullptr;
    for (int steps = 0; steps < 100000; ++steps) {
      Progress progress;
      if (sending) {
        if (Status status = sender->Step(&progress); !status.ok()) return status;
        sending = !progress.done;
      }
      PassOn();
      if (head == nullptr) {
        if (Status status = receiver->Peek(&head); !status.ok()) return status;
        if (head != nullptr) receiver->Accept({{received->data(), received->size()}});
        continue;
      }
      if (Status status = receiver->Step(&progress); !status.ok()) return status;
      if (progress.done) return Status();
    }
    return InternalError("nothing moves");
  }

  std::unique_ptr<Sender> sender;
  std::unique_ptr<Receiver> receiver;
  // Bytes that a socket has passed on.
  size_t passed(size_t lane) const { return passed_[lane]; }

 private:
  static void Connect(std::vector<UniqueFd>* end, std::vector<UniqueFd>* wire) {
    int fds[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    end->emplace_back(fds[0]);
    wire->emplace_back(fds[1]);
  }

  device::HostSpace space_;
  const std::optional<Flip> flip_;
  std::vector<UniqueFd> out_, in_;
  std::vector<size_t> passed_;
};

std::vector<std::byte> Pattern(size_t bytes) {
  std::vector<std::byte> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(i * 131 + (i >> 8));
  return data;
}

constexpr size_t kHeader = sizeof(WireHeader) + 4;

TEST(Checksums, LetEverySizePass) {
  std::vector<std::byte> received;
  for (size_t lanes : {1, 2, 3}) {
    Wire wire(lanes, /*checksum=*/true, std::nullopt);
    for (size_t bytes : {size_t{0}, size_t{1}, size_t{15000}, kChunkBytes - 1, kChunkBytes,
                         kChunkBytes + 1, 2 * kChunkBytes, 7 * kChunkBytes + 12345}) {
      const std::vector<std::byte> sent = Pattern(bytes);
      const Status status = wire.Move(sent, &received);
      ASSERT_TRUE(status.ok()) << bytes << " bytes: " << status.message();
      EXPECT_EQ(received, sent);
    }
  }
}

TEST(Checksums, AreNotThereUnlessAskedFor) {
  std::vector<std::byte> received;
  Wire with(1, true, std::nullopt), without(1, false, std::nullopt);
  const std::vector<std::byte> sent = Pattern(2 * kChunkBytes + 1);
  ASSERT_TRUE(with.Move(sent, &received).ok());
  ASSERT_TRUE(without.Move(sent, &received).ok());
  EXPECT_EQ(without.passed(0), sizeof(WireHeader) + sent.size());
  EXPECT_EQ(with.passed(0), kHeader + sent.size() + 3 * 4);
}

TEST(Checksums, WithoutThemAFlippedBitOfThePayloadIsNotSeen) {
  std::vector<std::byte> received;
  Wire wire(1, false, Flip{0, sizeof(WireHeader) + 1000, 3});
  const std::vector<std::byte> sent = Pattern(5000);
  ASSERT_TRUE(wire.Move(sent, &received).ok());
  EXPECT_NE(received, sent);
}

TEST(Checksums, AFlippedBitAnywhereNamesTheStripe) {
  constexpr size_t kBytes = 5 * kChunkBytes + 777;
  const size_t second = StripeOf(kBytes, 1, 2).end - StripeOf(kBytes, 1, 2).begin;
  const Flip flips[] = {
      {0, 0, 0},                                      // magic
      {0, 40, 7},                                     // the header's middle
      {0, sizeof(WireHeader) + 2, 1},                 // the header's checksum
      {0, kHeader, 0},                                // first byte
      {0, kHeader + kChunkBytes - 1, 7},              // last byte of a chunk
      {0, kHeader + kChunkBytes + 3, 2},              // a checksum
      {0, kHeader + kChunkBytes + 4, 5},              // first byte of the next chunk
      {1, 17, 4},                                     // the other stripe
      {1, second + second / kChunkBytes * 4 - 1, 6},  // its last byte
  };
  for (const Flip& flip : flips) {
    std::vector<std::byte> received;
    Wire wire(2, /*checksum=*/true, flip);
    const Status status = wire.Move(Pattern(kBytes), &received);
    SCOPED_TRACE("lane " + std::to_string(flip.lane) + " byte " + std::to_string(flip.byte));
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.kind(), ErrorKind::kCorrupt);
    const std::string stripe = "stripe " + std::to_string(flip.lane + 1) + " of 2";
    EXPECT_NE(status.message().find(stripe), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("CRC-32C"), std::string::npos) << status.message();
  }
}

}  // namespace
}  // namespace hetccl::transport::tcp
