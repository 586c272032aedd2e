// The native half of a world: plans, channels, running exchanges and the threads that serve them.
#ifndef XLA_FFI_EXCHANGE_ENGINE_H_
#define XLA_FFI_EXCHANGE_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "xla_ffi/common/elastic_pool.h"
#include "xla_ffi/common/status.h"
#include "xla_ffi/device/host_space.h"
#include "xla_ffi/device/space.h"
#include "xla_ffi/device/stream/stream_space.h"
#include "xla_ffi/exchange/channel_table.h"
#include "xla_ffi/exchange/exchange.h"
#include "xla_ffi/exchange/on_streams.h"
#include "xla_ffi/exchange/plan.h"
#include "xla_ffi/exchange/watchdog.h"

namespace hetccl {

struct EngineOptions {
  uint64_t epoch = 0;
  double timeout_s = 60;
  double arrival_timeout_s = 600;
  double mismatch_grace_s = 2;
  double abort_grace_s = 2;
  // Behind a failure, for copies and fills of a device that are still to end; then the process
  // ends.
  double give_back_s = 10;
  int proxy_threads = 0;  // 0: chosen by the number of cores
  double spin_us = 50;    // how long a proxy thread spins before it sleeps
  int copy_threads = 0;   // of the host's side of pairs with a GPU; 0: by the number of cores
  // Host memory between one socket and a GPU, for each direction of a channel.
  uint64_t staging_slot_bytes = 1 << 20;
  uint64_t staging_slots = 8;
  bool checksum = false;  // of what goes over tcp; the same in all processes
  // What a GPU's program gets for integers of a failed exchange, which cannot be poisoned: the end
  // of the process, or zeros and the error of the next check.
  bool exit_on_integer_failure = true;
};

// What the engine has done with one peer, or in all.
struct PeerStats {
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  uint64_t messages_sent = 0;
  uint64_t messages_received = 0;
};

struct EngineStats {
  std::map<uint32_t, PeerStats> peers;  // by rank
  int64_t in_flight = 0;                // exchanges begun and not complete
  uint64_t copied = 0;                  // exchanges whose buffers moved between start and done
  int proxy_threads = 0;
  int completion_threads = 0;
  int copy_threads = 0;
  struct Device {
    std::string platform;
    std::string name;
    device::SpaceStats space;
  };
  std::map<int, Device> devices;  // GPUs, by ordinal
  struct Routed {
    uint32_t local_rank;
    uint32_t peer_rank;
    bool outgoing;
    transport::Route route;
  };
  std::vector<Routed> routed;  // channels that have a device of their own
};

// One custom call that starts an exchange.
struct StartRequest {
  uint64_t plan = 0;
  uint64_t program = 0;
  uint32_t index = 0;
  int device_ordinal = 0;
  device::Queue queue = nullptr;  // the stream of the program, on a GPU
  std::vector<BufferView> sends;
  std::vector<BufferView> receives;
};

// What start tells done. Id 0 stands for an exchange that was not begun because the world has
// failed already.
struct Ticket {
  uint64_t id = 0;
  bool failed = false;
};

// Thread-safe. Owns all native threads of a world (docs/threads.md); Close ends them.
//
// Failure: what the engine notices becomes the candidate (WaitFailure); Abort adopts the error that
// all processes agreed on. After that every exchange, pending or new, completes as failed, so that
// programs run to their end and report the error on all devices alike.
class Engine {
 public:
  explicit Engine(const EngineOptions& options);
  // Closes with a bound of five seconds.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // `gpu`: the device's memory and streams; null for a device whose buffers are host memory. An
  // error for a second GPU where streams are held by host functions: drivers run those one at a
  // time, so one device's hold could keep the other from what the first one's peers wait for.
  Status SetLocalDevice(int device_ordinal, uint32_t rank,
                        std::shared_ptr<device::StreamSpace> gpu = nullptr);
  // Where the buffers of this local rank lie. For transports.
  device::Space& SpaceOf(uint32_t rank);
  // Null unless the device is a GPU.
  std::shared_ptr<device::StreamSpace> Gpu(int device_ordinal) const;
  // The same by rank.
  std::shared_ptr<device::StreamSpace> GpuOf(uint32_t rank) const;
  const EngineOptions& options() const { return options_; }
  Directory& directory() { return context_->directory; }
  ChannelTable& channels() { return channels_; }

  // Idempotent; the same id with other content for the same device is an error.
  Status AddPlan(uint64_t id, std::string text, uint64_t wire_id, int device_ordinal,
                 const std::vector<PeerRange>& sends, const std::vector<PeerRange>& receives,
                 std::vector<ZeroRange> zeros);

  // Queues all messages of the plan and returns at once. The buffers must stay valid until the
  // exchange completes. Errors are the caller's: unknown plan or device, wrong buffers, closed.
  Status Start(const StartRequest& request, Ticket* ticket);
  // Hands out a started exchange, once. Null for an unknown id.
  std::shared_ptr<Exchange> Take(uint64_t id);
  // The same on a GPU: see OnStreams::Take.
  std::shared_ptr<Exchange> TakeFromStream(int device_ordinal, uint64_t plan,
                                           const std::vector<const void*>& receives,
                                           const std::vector<const void*>& sends) {
    return on_streams_.Take(device_ordinal, plan, receives, sends);
  }
  // Whether every peer that the plan receives from has connected.
  bool PeersConnected(const DevicePlan& plan);
  void CountCopied() { copied_.fetch_add(1, std::memory_order_relaxed); }

  std::optional<Status> WaitFailure(Duration bound);
  void Abort(const Status& status);
  // Makes this the candidate if there is none.
  void Fail(const Status& status) { context_->failure.Propose(status); }
  // The adopted error; ok while there is none.
  Status failure() const { return context_->failure.adopted(); }
  // Outlives the engine, for completions that do.
  std::shared_ptr<const ChannelContext> context() const { return context_; }

  EngineStats Stats() const;
  // Each message that is queued or moving.
  std::vector<PendingPart> Pending() const;

  // Fails what is pending, says goodbye to the peers and joins all threads. Idempotent. An error
  // names the threads that did not end in time; nothing they use is freed.
  Status Close(Duration bound);

 private:
  bool HasGpu() const;
  std::shared_ptr<const DevicePlan> FindPlan(uint64_t id, int device_ordinal) const;
  // Ok if starts may go on failing softly; the error once a program does so for too long.
  Status CheckAfterFailure(uint64_t program);
  void Post(const std::shared_ptr<Exchange>& exchange, const StartRequest& request);
  // Keeps a part without a channel pending until the failure that it causes is adopted.
  void PostOrphan(const std::shared_ptr<Exchange>& exchange);
  void EndOrphans();
  void Watch();

  struct LocalDevice {
    uint32_t rank;
    std::shared_ptr<device::StreamSpace> gpu;
  };

  const EngineOptions options_;
  device::HostSpace host_;  // before the channels, whose copies use it
  const std::shared_ptr<ChannelContext> context_;
  const std::shared_ptr<ElasticPool> pool_;
  const std::shared_ptr<std::atomic<int64_t>> in_flight_;
  std::atomic<uint64_t> copied_{0};
  std::atomic<bool> closed_{false};
  OnStreams on_streams_;

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::map<int, LocalDevice> local_devices_;
  std::map<std::pair<uint64_t, int>, std::shared_ptr<const DevicePlan>> plans_;
  std::unordered_map<uint64_t, std::shared_ptr<Exchange>> started_;
  std::unordered_map<uint64_t, TimePoint> failing_since_;  // by program
  // Exchanges with a part that has no channel; they end when the failure is adopted.
  std::vector<std::shared_ptr<Exchange>> orphans_;

  std::mutex close_mutex_;
  ChannelTable channels_;
  std::unique_ptr<Watchdog> watchdog_;  // last: its thread uses everything above
};

}  // namespace hetccl

#endif  // XLA_FFI_EXCHANGE_ENGINE_H_
