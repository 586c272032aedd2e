// Two engines in one process, connected both ways. For tests only.
#ifndef XLA_FFI_EXCHANGE_TEST_WORLD_H_
#define XLA_FFI_EXCHANGE_TEST_WORLD_H_

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/device/host_space.h"
#include "xla_ffi/exchange/engine.h"
#include "xla_ffi/transport/shm/factory.h"
#include "xla_ffi/transport/tcp/factory.h"
#include "xla_ffi/transport/testing/loopback.h"

namespace hetccl {

enum class Wire { kTcp, kShm, kLoopback };

inline device::Space& HostMemory() {
  static auto* space = new device::HostSpace();
  return *space;
}

// A channel between buffers in two spaces; small slots, so that few bytes need many.
inline transport::testing::Pair MakeWire(Wire wire, device::Space& from = HostMemory(),
                                         device::Space& to = HostMemory()) {
  if (wire == Wire::kLoopback) return transport::testing::MakeLoopback();
  int fds[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  std::vector<UniqueFd> left, right;
  left.emplace_back(fds[0]);
  right.emplace_back(fds[1]);
  transport::testing::Pair pair;
  Status status;
  if (wire == Wire::kTcp) {
    const transport::Staging staging{4096, 4};
    status = transport::tcp::MakeSender(std::move(left), from, staging, {}, &pair.sender);
    EXPECT_TRUE(status.ok()) << status.message();
    status = transport::tcp::MakeReceiver(std::move(right), to, staging, {}, &pair.receiver);
  } else {
    UniqueFd memfd;
    EXPECT_TRUE(transport::shm::MakeSegment(4096, 4, &memfd).ok());
    left.emplace_back(::dup(memfd.get()));
    right.push_back(std::move(memfd));
    status = transport::shm::MakeSender(std::move(left), from, &pair.sender);
    EXPECT_TRUE(status.ok()) << status.message();
    status = transport::shm::MakeReceiver(std::move(right), to, &pair.receiver);
  }
  EXPECT_TRUE(status.ok()) << status.message();
  return pair;
}

// What a test says about one side of an exchange.
struct Call {
  uint64_t plan = 1;
  uint64_t program = 0xAB;
  uint32_t index = 0;
};

// One started exchange and the memory that it uses: until the exchange completes the engine may
// write there, so that the end of this object waits for it, as XLA keeps its buffers.
struct Running {
  Running() = default;
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  ~Running() {
    if (failed.valid()) failed.wait_for(std::chrono::seconds(20));
  }

  std::vector<float> sent;
  std::vector<float> received;
  std::shared_ptr<Exchange> exchange;
  std::future<bool> failed;

  // Waits for the completion; true if the exchange failed.
  bool Failed(std::chrono::seconds bound = std::chrono::seconds(20)) {
    if (failed.wait_for(bound) != std::future_status::ready) {
      ADD_FAILURE() << "the exchange never completed";
      return true;
    }
    return failed.get();
  }
};

// Rank 0 ("left/0 rank 0") and rank 1 ("right/0 rank 1").
class TestWorld {
 public:
  static EngineOptions Quick() {
    EngineOptions options;
    options.epoch = 77;
    options.timeout_s = 10;
    options.arrival_timeout_s = 10;
    options.mismatch_grace_s = 0.2;
    options.abort_grace_s = 0.1;
    return options;
  }

  explicit TestWorld(EngineOptions left = Quick(), EngineOptions right = Quick()) {
    engines_[0] = std::make_unique<Engine>(left);
    engines_[1] = std::make_unique<Engine>(right);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      EXPECT_TRUE(engines_[rank]->SetLocalDevice(0, rank).ok());
      engines_[rank]->directory().SetRank(0, "left/0 rank 0");
      engines_[rank]->directory().SetRank(1, "right/0 rank 1");
    }
  }

  // Makes the rank's device a GPU. Before Connect.
  void SetGpu(int rank, std::shared_ptr<device::StreamSpace> space) {
    const int ordinal = space->gpu().ordinal();
    ordinals_[rank] = ordinal;
    const Status status =
        engines_[rank]->SetLocalDevice(ordinal, static_cast<uint32_t>(rank), std::move(space));
    EXPECT_TRUE(status.ok()) << status.message();
  }

  Engine& engine(int rank) { return *engines_[rank]; }
  void Destroy(int rank) { engines_[rank].reset(); }

  void Connect(Wire wire) {
    for (uint32_t from = 0; from < 2; ++from) {
      Connect(from,
              MakeWire(wire, engines_[from]->SpaceOf(from), engines_[1 - from]->SpaceOf(1 - from)));
    }
  }
  void Connect(uint32_t from, transport::testing::Pair pair) {
    AddOutgoing(from, std::move(pair.sender));
    AddIncoming(from, std::move(pair.receiver));
  }
  void AddOutgoing(uint32_t from, std::unique_ptr<transport::Sender> sender) {
    EXPECT_TRUE(engines_[from]->channels().AddOutgoing(from, 1 - from, std::move(sender)).ok());
  }
  void AddIncoming(uint32_t from, std::unique_ptr<transport::Receiver> receiver) {
    EXPECT_TRUE(
        engines_[1 - from]->channels().AddIncoming(1 - from, from, std::move(receiver)).ok());
  }

  // A plan that swaps `count` floats with the other rank, on both ranks or one.
  void AddSwap(uint64_t plan, const std::string& text, size_t count, int only_rank = -1,
               uint64_t wire_id = 0) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      if (only_rank >= 0 && rank != static_cast<uint32_t>(only_rank)) continue;
      const std::vector<PeerRange> range = {{1 - rank, 0, 0, count * sizeof(float)}};
      const Status status =
          engines_[rank]->AddPlan(plan, text, wire_id ? wire_id : std::hash<std::string>()(text),
                                  ordinals_[rank], range, range, {});
      EXPECT_TRUE(status.ok()) << status.message();
    }
  }

  // Starts a swap of `count` floats, all of them `value`, on this rank.
  std::unique_ptr<Running> Start(int rank, const Call& call, size_t count, float value = 1) {
    auto running = std::make_unique<Running>();
    running->sent.assign(count, value);
    running->received.assign(count, -1);
    StartRequest request;
    request.plan = call.plan;
    request.program = call.program;
    request.index = call.index;
    const uint64_t bytes = count * sizeof(float);
    request.sends = {{reinterpret_cast<std::byte*>(running->sent.data()), bytes}};
    request.receives = {{reinterpret_cast<std::byte*>(running->received.data()), bytes}};
    Ticket ticket;
    const Status status = engines_[rank]->Start(request, &ticket);
    EXPECT_TRUE(status.ok()) << status.message();
    std::promise<bool> promise;
    running->failed = promise.get_future();
    if (ticket.id == 0) {
      EXPECT_TRUE(ticket.failed);
      promise.set_value(true);
      return running;
    }
    running->exchange = engines_[rank]->Take(ticket.id);
    if (running->exchange == nullptr) {
      ADD_FAILURE() << "a started exchange is unknown";
      promise.set_value(true);
      return running;
    }
    auto shared = std::make_shared<std::promise<bool>>(std::move(promise));
    bool failed = false;
    if (running->exchange->Await([shared](bool f) { shared->set_value(f); }, &failed)) {
      shared->set_value(failed);
    }
    return running;
  }

 private:
  std::array<std::unique_ptr<Engine>, 2> engines_;
  std::array<int, 2> ordinals_{};  // of the ranks' devices
};

}  // namespace hetccl

#endif  // XLA_FFI_EXCHANGE_TEST_WORLD_H_
