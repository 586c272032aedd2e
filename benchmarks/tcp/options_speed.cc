// What checksums and TLS cost on a tcp channel over loopback: GB/s of large messages with and
// without, by turns, one thread for each half.
//
//   bazel run -c opt //xla_ffi/transport/tcp:options_speed [sockets]

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/common/crc32c.h"
#include "xla_ffi/device/host_space.h"
#include "xla_ffi/transport/tcp/factory.h"
#include "xla_ffi/transport/testing/tcp_pair.h"

namespace hetccl::transport::tcp {
namespace {

constexpr size_t kBytes = 64 << 20;
constexpr int kMessages = 8;
constexpr int kRounds = 9;

void Require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "%s failed\n", what);
  std::exit(1);
}

// A channel, and the bytes that go over it.
class Channel {
 public:
  Channel(int sockets, const Options& options) : from_(kBytes, std::byte{42}), to_(kBytes) {
    std::vector<UniqueFd> left, right;
    for (int i = 0; i < sockets; ++i) {
      auto [a, b] = testing::LoopbackTcpPair();
      left.push_back(std::move(a));
      right.push_back(std::move(b));
    }
    // With TLS each end waits for the other.
    std::thread sending([&, from = &left] {
      Require(MakeSender(std::move(*from), space_, {}, options, &sender_).ok(), "making a sender");
    });
    Require(MakeReceiver(std::move(right), space_, {}, options, &receiver_).ok(), "a receiver");
    sending.join();
  }

  // Bytes per second.
  double Measure() {
    const TimePoint begin = Clock::now();
    std::thread sending([this] { Send(); });
    Receive();
    sending.join();
    return kMessages * static_cast<double>(kBytes) / ToSeconds(Clock::now() - begin);
  }

 private:
  void Send() {
    WireHeader header = MakeHeader(MessageType::kData);
    header.payload_bytes = kBytes;
    for (int i = 0; i < kMessages; ++i) {
      sender_->Begin(header, {{from_.data(), kBytes}});
      for (Progress progress; !progress.done;) Require(sender_->Step(&progress).ok(), "sending");
    }
  }
  void Receive() {
    for (int i = 0; i < kMessages; ++i) {
      const WireHeader* head = nullptr;
      while (head == nullptr) Require(receiver_->Peek(&head).ok(), "peeking");
      receiver_->Accept({{to_.data(), kBytes}});
      for (Progress progress; !progress.done;) {
        Require(receiver_->Step(&progress).ok(), "receiving");
      }
    }
  }

  device::HostSpace space_;
  std::vector<std::byte> from_, to_;
  std::unique_ptr<Sender> sender_;
  std::unique_ptr<Receiver> receiver_;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void Run(int sockets) {
  Options tls;
  tls.tls_keys.assign(sockets, std::string(kTlsKeyBytes, 'k'));
  Channel plain(sockets, {}), checked(sockets, {true}), encrypted(sockets, tls);
  Channel* const channels[] = {&plain, &checked, &encrypted};
  std::array<std::vector<double>, 3> rates;
  for (int round = -1; round < kRounds; ++round) {
    for (size_t i = 0; i < rates.size(); ++i) {
      const double rate = channels[i]->Measure() / 1e9;
      if (round >= 0) rates[i].push_back(rate);  // before, memory is touched for the first time
    }
  }
  const double without = Median(rates[0]), sums = Median(rates[1]), inside = Median(rates[2]);
  std::printf(
      "%d sockets: %.2f GB/s, with checksums %.2f GB/s (%.0f %%), in TLS %.2f GB/s (%.0f %%)\n",
      sockets, without, sums, 100 * sums / without, inside, 100 * inside / without);
}

}  // namespace
}  // namespace hetccl::transport::tcp

int main(int argc, char** argv) {
  std::printf("CRC-32C by %s\n", hetccl::Crc32cHasInstruction() ? "instruction" : "tables");
  if (argc > 1) {
    hetccl::transport::tcp::Run(std::atoi(argv[1]));
    return 0;
  }
  for (int sockets : {1, 2}) hetccl::transport::tcp::Run(sockets);
}
