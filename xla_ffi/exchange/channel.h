// What both directions of a channel share: names, bounds, counters, and how they break.
#ifndef XLA_FFI_EXCHANGE_CHANNEL_H_
#define XLA_FFI_EXCHANGE_CHANNEL_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/common/status.h"
#include "xla_ffi/exchange/directory.h"
#include "xla_ffi/exchange/exchange.h"
#include "xla_ffi/exchange/failure.h"
#include "xla_ffi/proxy/task.h"
#include "xla_ffi/transport/transport.h"

namespace hetccl {

// How long a channel waits for what.
struct Bounds {
  Duration progress;        // between two bytes of a message under way
  Duration arrival;         // until the peer reaches the operation
  Duration mismatch_grace;  // of silence, see IncomingChannel
  // Behind a failure, for whatever still touches a program's memory; then the process ends.
  Duration give_back;
};

// Shared by all channels of an engine.
struct ChannelContext {
  ChannelContext(uint64_t epoch, const Bounds& bounds, Duration abort_grace)
      : epoch(epoch), bounds(bounds), failure(abort_grace) {}

  const uint64_t epoch;
  const Bounds bounds;
  Directory directory;
  FailureState failure;
  // Set before the failure that stands for the end of this world is adopted.
  std::atomic<bool> closing{false};

  using FindOperation = std::function<std::string(uint32_t peer_rank)>;
  // Who answers OperationWith; null from the moment on at which it goes away. Waits for the answer
  // under way.
  void SetFindOperation(FindOperation find);
  // The oldest operation under way with this peer, on whatever channel; empty if there is none.
  // Takes the channels' locks, so call it without one.
  std::string OperationWith(uint32_t peer_rank) const;

  // When anything last moved to or from this peer, in Clock ticks; shared by its channels.
  std::shared_ptr<std::atomic<int64_t>> ProgressWith(uint32_t peer_rank);

 private:
  mutable std::mutex mutex_;      // held while find_operation_ runs
  FindOperation find_operation_;  // guarded by mutex_
  // Another lock, as channels are made under the one of the table, which find_operation_ takes.
  std::mutex progress_mutex_;
  // Guarded by progress_mutex_:
  std::unordered_map<uint32_t, std::shared_ptr<std::atomic<int64_t>>> progress_;
};

// A message that is queued or moving.
struct PendingPart {
  uint32_t peer_rank = 0;
  uint64_t program = 0;
  std::string text;  // one line for people
};

// Counts the exchanges of a (program, index): both sides count alike, so the count tells runs of
// one program apart. Not thread-safe.
class OccurrenceCounter {
 public:
  uint64_t Next(uint64_t program, uint32_t index) { return counts_[{program, index}]++; }

 private:
  struct Hash {
    size_t operator()(const std::pair<uint64_t, uint32_t>& key) const {
      return std::hash<uint64_t>()(key.first * 0x9E3779B97F4A7C15u + key.second);
    }
  };
  std::unordered_map<std::pair<uint64_t, uint32_t>, uint64_t, Hash> counts_;
};

// The base of both directions.
//
// Threads: Step and the transport belong to the proxy thread. Post (of the subclasses) comes from
// XLA's threads, CheckDeadlines from the watchdog, FailAll from whoever adopts a failure. `mutex_`
// guards the queues; while it is held no other lock is taken than the Directory's, which calls
// nothing, and nothing outside is called.
//
// A channel that breaks proposes the failure and stops moving; its parts stay pending until a
// failure is adopted and FailAll comes.
class Channel : public proxy::Task {
 public:
  Channel(std::shared_ptr<ChannelContext> context, uint32_t local_rank, uint32_t peer_rank)
      : context_(std::move(context)),
        local_rank_(local_rank),
        peer_rank_(peer_rank),
        progress_with_peer_(context_->ProgressWith(peer_rank)) {}

  uint32_t local_rank() const { return local_rank_; }
  uint32_t peer_rank() const { return peer_rank_; }
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }
  uint64_t messages() const { return messages_.load(std::memory_order_relaxed); }

  // Proposes a timeout if a bound has passed. Any thread.
  virtual void CheckDeadlines(TimePoint now) = 0;
  // Ends all parts as failed, those posted later too. A part that the proxy thread is moving ends
  // on that thread, in its next step. Any thread.
  virtual void FailAll() = 0;
  // Adds each part that is queued or moving. Any thread.
  virtual void Describe(std::vector<PendingPart>* parts) const = 0;
  // The oldest operation that is queued or moving; empty if there is none. Any thread.
  virtual std::string OldestOperation() const = 0;
  // See transport::Endpoint::route; empty before the channel is connected. Any thread.
  virtual transport::Route route() const = 0;
  // Ends what FailAll left to the proxy thread and says goodbye to the peer. Requires FailAll and
  // that no proxy thread runs any more.
  virtual void Shutdown() = 0;
  // See transport::Endpoint::Drained; after Shutdown.
  virtual bool Drained() = 0;
  // Gives descriptors and memory back, whoever keeps the channel; after Shutdown, and the last use
  // of the transport.
  virtual void Release() = 0;

 protected:
  std::string PeerName() const { return context_->directory.Rank(peer_rank_); }
  std::string LocalName() const { return context_->directory.Rank(local_rank_); }
  // "psum/data f32[4] (exchange #2 of program 1f (train))"
  std::string OperationName(const Exchange& exchange) const;
  // The channel carries nothing from now on. Proxy thread.
  void Break(Status status);
  // Breaks with what the transport reported, `doing` "sending to "; `needed_by` as in CheckPeer.
  void BreakWith(const Status& status, const char* doing, const Exchange* needed_by);
  // Breaks if the peer is gone; `needed_by` is the operation that needs it, or null when idle.
  void CheckPeer(const transport::Endpoint& endpoint, const Exchange* needed_by);
  // Whether the exchange's device has come to its start. Breaks if the device is lost. Proxy
  // thread.
  bool Started(Exchange* exchange);
  // Waits until nothing touches the memory of the message under way, and ends the process if that
  // does not come. Closing thread.
  void AwaitQuiet(transport::Endpoint* endpoint, const Exchange& exchange) const;
  // Behind a failure: ends the process if the part under way has not ended in time. The memory
  // could not be given back, and its program would wait for good. Watchdog.
  void CheckGivenBack(TimePoint now, const Exchange* under_way);
  // Counts progress of the part under way. Proxy thread.
  void Moved(size_t bytes);
  // Notes that the part under way, and thus something with this peer, goes on. Proxy thread.
  void NoteProgress();
  // How long the channel's proxy thread has been inside of one step, as far as the watchdog has
  // seen. To be called at each look. Watchdog.
  Duration InsideStep(TimePoint now);
  // The text of a timeout. What does not end on the own side is told instead of the hint.
  Status Timeout(const Exchange& exchange, const char* verb, const char* preposition,
                 uint64_t moved, uint64_t total, Duration waited, bool under_way,
                 const char* hint) const;
  [[noreturn]] void EndWith(const Exchange& exchange) const;

  const std::shared_ptr<ChannelContext> context_;
  const uint32_t local_rank_;
  const uint32_t peer_rank_;
  const std::shared_ptr<std::atomic<int64_t>> progress_with_peer_;  // Clock ticks
  std::atomic<bool> broken_{false};

  // Of the part under way; written by the proxy thread.
  std::atomic<uint64_t> moved_{0};
  std::atomic<int64_t> last_progress_{0};  // Clock ticks
  std::atomic<bool> copying_{false};       // a copy on the own device is under way
  // Watchdog only:
  int late_looks_ = 0;
  uint64_t seen_steps_ = 0;
  TimePoint seen_steps_at_{};
  Duration inside_step_{0};

  mutable std::mutex mutex_;
  bool closed_ = false;        // guarded by mutex_: parts are refused
  OccurrenceCounter counter_;  // guarded by mutex_

 private:
  // " during psum/data f32[4] (...)", or that there is none.
  std::string During(const Exchange* needed_by) const;

  std::atomic<uint64_t> bytes_{0};
  std::atomic<uint64_t> messages_{0};

 protected:
  void CountMessage() { messages_.fetch_add(1, std::memory_order_relaxed); }
};

}  // namespace hetccl

#endif  // XLA_FFI_EXCHANGE_CHANNEL_H_
