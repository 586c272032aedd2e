// How fast the RDMA transport is, without anything above it: two processes on one machine, one
// channel each way between two devices.
//
//   channel_speed FROM_DEVICE TO_DEVICE GID_INDEX
//
// Prints one line of JSON: bytes per second of RDMA writes in messages of several sizes, half the
// round trip of 8 bytes in microseconds, and the payload bytes that CPUs have copied for the large
// messages. Waiting yields the core and then sleeps, as the engine's threads do. The clock starts
// once both sides have touched their memory: page faults of 64 MB take longer than its way.
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/device/host_space.h"
#include "xla_ffi/transport/rdma/factory.h"
#include "xla_ffi/transport/span_cursor.h"

namespace hetccl::transport {
namespace {

constexpr size_t kTotal = 64 << 20;
constexpr size_t kRepeated = 1 << 20;
constexpr int kPings = 500;
constexpr int kWarmUp = 20;
constexpr auto kSpin = std::chrono::microseconds(50);  // the engine's spin_us
// For single round trips, which are compared with a loop that never sleeps.
constexpr auto kLongSpin = std::chrono::milliseconds(100);

void Check(const Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", what, status.message().c_str());
  std::exit(1);
}

// One process: a channel out, a channel in.
struct End {
  device::HostSpace space;
  std::unique_ptr<Sender> out;
  std::unique_ptr<Receiver> in;
  Duration spin = kSpin;

  // `first`: makes the outgoing channel first, the other process the incoming one.
  void Connect(int out_socket, int in_socket, const rdma::Options& options, bool first) {
    for (bool outgoing : {first, !first}) {
      std::vector<UniqueFd> sockets;
      sockets.emplace_back(outgoing ? out_socket : in_socket);
      Status status = outgoing ? rdma::MakeSender(std::move(sockets), space, {}, options, &out)
                               : rdma::MakeReceiver(std::move(sockets), space, {}, options, &in);
      Check(status, "connecting");
    }
  }

  void Send(const std::byte* data, size_t bytes) { Send({{data, bytes}}); }
  void Send(ConstPayload payload) {
    WireHeader header = MakeHeader(MessageType::kData);
    header.payload_bytes = TotalSize(payload);
    out->Begin(header, std::move(payload));
    Progress progress;
    TimePoint since = Clock::now();
    while (true) {
      Check(out->Step(&progress), "sending");
      if (progress.done) return;
      if (progress.bytes > 0) {
        since = Clock::now();
      } else {
        Wait(*out, &since);
      }
    }
  }

  void Receive(std::byte* data, size_t bytes) { Receive({{data, bytes}}); }
  void Receive(MutablePayload payload) {
    const WireHeader* header = nullptr;
    TimePoint since = Clock::now();
    while (header == nullptr) {
      Check(in->Peek(&header), "receiving");
      if (header == nullptr) Wait(*in, &since);
    }
    in->Accept(std::move(payload));
    Progress progress;
    while (true) {
      Check(in->Step(&progress), "receiving");
      if (progress.done) return;
      if (progress.bytes > 0) {
        since = Clock::now();
      } else {
        Wait(*in, &since);
      }
    }
  }

  // As a proxy thread waits: it yields for a while, then sleeps.
  template <typename Half>
  void Wait(Half& half, TimePoint* since) {
    if (half.peer() != PeerState::kAlive) std::exit(1);
    if (Clock::now() - *since < spin) {
      ::sched_yield();
      return;
    }
    if (!half.ArmDoorbell()) {
      std::vector<pollfd> fds;
      for (int fd : half.poll_fds()) fds.push_back({fd, POLLIN, 0});
      (void)::poll(fds.data(), fds.size(), 1000);
    }
    half.OnReady();
    *since = Clock::now();
  }
};

std::vector<size_t> Sizes() { return {64 << 10, 1 << 20, kTotal}; }

// A message whose every megabyte is the same memory, as a plain loop has it: caches matter as much
// as the NIC does where the NIC is software.
template <typename SpanType, typename Byte>
std::vector<SpanType> Repeated(Byte* data) {
  return std::vector<SpanType>(kTotal / kRepeated, SpanType{data, kRepeated});
}

void Answer(End* end) {
  std::vector<std::byte> data(kTotal);
  end->Send(data.data(), 8);
  end->Receive(Repeated<MutableSpan>(data.data()));
  end->Send(data.data(), 8);
  for (size_t bytes : Sizes()) {
    for (size_t at = 0; at < kTotal; at += bytes) end->Receive(data.data(), bytes);
    end->Send(data.data(), 8);
  }
  end->spin = kLongSpin;
  for (int i = 0; i < kWarmUp + kPings; ++i) {
    end->Receive(data.data(), 8);
    end->Send(data.data(), 8);
  }
}

void Ask(End* end) {
  std::vector<std::byte> data(kTotal, std::byte{7});
  std::string line = "{";
  std::byte answer[8];
  end->Receive(answer, 8);
  const TimePoint start = Clock::now();
  end->Send(Repeated<ConstSpan>(static_cast<const std::byte*>(data.data())));
  char repeated[80];
  std::snprintf(repeated, sizeof(repeated), "\"bytes_per_s_repeated_memory\": %.0f, ",
                static_cast<double>(kTotal) / ToSeconds(Clock::now() - start));
  line += repeated;
  end->Receive(answer, 8);
  for (size_t bytes : Sizes()) {
    const uint64_t copied = end->out->route().copied;
    const TimePoint begin = Clock::now();
    for (size_t at = 0; at < kTotal; at += bytes) end->Send(data.data(), bytes);
    const double seconds = ToSeconds(Clock::now() - begin);
    const unsigned long copies = end->out->route().copied - copied;
    end->Receive(answer, 8);
    char entry[160];
    std::snprintf(entry, sizeof(entry),
                  "\"bytes_per_s_%zu\": %.0f, \"copied_by_sender_%zu\": %lu, ", bytes,
                  static_cast<double>(kTotal) / seconds, bytes, copies);
    line += entry;
  }
  TimePoint begin;
  end->spin = kLongSpin;
  for (int i = 0; i < kWarmUp + kPings; ++i) {
    if (i == kWarmUp) begin = Clock::now();
    end->Send(data.data(), 8);
    end->Receive(answer, 8);
  }
  const double half_trip = ToSeconds(Clock::now() - begin) / kPings / 2 * 1e6;
  std::printf("%s\"half_round_trip_8_bytes_us\": %.2f}\n", line.c_str(), half_trip);
}

int Run(const std::string& from, const std::string& to, int gid_index) {
  int there[2], back[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, there) != 0 ||
      ::socketpair(AF_UNIX, SOCK_STREAM, 0, back) != 0) {
    return 1;
  }
  rdma::Options options;
  options.gid_index = gid_index;
  options.timeout = 14;
  options.retry_count = 6;
  const pid_t child = ::fork();
  if (child < 0) return 1;
  End end;
  if (child == 0) {
    ::close(there[0]);
    ::close(back[0]);
    options.device = to;
    end.Connect(back[1], there[1], options, /*first=*/false);
    Answer(&end);
    return 0;
  }
  ::close(there[1]);
  ::close(back[1]);
  options.device = from;
  end.Connect(there[0], back[0], options, /*first=*/true);
  Ask(&end);
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

}  // namespace
}  // namespace hetccl::transport

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: channel_speed FROM_DEVICE TO_DEVICE GID_INDEX\n");
    return 2;
  }
  return hetccl::transport::Run(argv[1], argv[2], std::atoi(argv[3]));
}
