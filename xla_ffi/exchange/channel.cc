#include "xla_ffi/exchange/channel.h"

#include <chrono>
#include <cstdio>
#include <thread>

#include "xla_ffi/exchange/end_process.h"

namespace hetccl {
namespace {

constexpr char kCopyStuck[] =
    "a copy to or from this rank's own device does not end; on a GPU another stream may wait in "
    "the hardware queue that the copies use: give the process more queues before JAX starts, "
    "CUDA_DEVICE_MAX_CONNECTIONS=32 or GPU_MAX_HW_QUEUES=8 (docs/gpu.md)";

constexpr char kInsideDriver[] =
    "it is this rank's own side that did not move: its thread waits inside a call of the GPU's "
    "driver, which something else in this process keeps busy until the device is idle (the load "
    "of a program or kernel, an allocation; docs/gpu.md)";

}  // namespace

void ChannelContext::SetFindOperation(FindOperation find) {
  std::lock_guard<std::mutex> lock(mutex_);
  find_operation_ = std::move(find);
}

std::string ChannelContext::OperationWith(uint32_t peer_rank) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return find_operation_ ? find_operation_(peer_rank) : "";
}

std::shared_ptr<std::atomic<int64_t>> ChannelContext::ProgressWith(uint32_t peer_rank) {
  std::lock_guard<std::mutex> lock(progress_mutex_);
  auto& progress = progress_[peer_rank];
  if (progress == nullptr) progress = std::make_shared<std::atomic<int64_t>>(0);
  return progress;
}

std::string Channel::OperationName(const Exchange& exchange) const {
  return exchange.plan().text() + " (exchange #" + std::to_string(exchange.index()) + " of " +
         context_->directory.Program(exchange.program()) + ")";
}

void Channel::Break(Status status) {
  broken_.store(true, std::memory_order_release);
  context_->failure.Propose(status);
}

void Channel::BreakWith(const Status& status, const char* doing, const Exchange* needed_by) {
  // Without a lost rank: where RDMA gives up, the way to the peer may be gone and not its process.
  Break(Status(status.kind(), doing + PeerName() + " at " + LocalName() + During(needed_by) + ": " +
                                  status.message()));
}

std::string Channel::During(const Exchange* needed_by) const {
  // An idle channel may be the first to notice, while another one with this peer is in use.
  const std::string operation =
      needed_by ? OperationName(*needed_by) : context_->OperationWith(peer_rank_);
  return operation.empty() ? " while no operation was under way" : " during " + operation;
}

void Channel::CheckPeer(const transport::Endpoint& endpoint, const Exchange* needed_by) {
  const transport::PeerState state = endpoint.peer();
  if (state == transport::PeerState::kAlive) return;
  if (state == transport::PeerState::kGoodbye && needed_by == nullptr) return;
  std::string text = "lost " + PeerName() + " at " + LocalName() + During(needed_by);
  if (state == transport::PeerState::kGoodbye) {
    text += ": it has left the world (shut down or ended) before this operation";
  } else {
    text += ": " + endpoint.lost_reason() + "; its process has died or was killed, see its output";
  }
  Break(Status(ErrorKind::kPeerLost, std::move(text), peer_rank_));
}

bool Channel::Started(Exchange* exchange) {
  bool started = false;
  if (Status status = exchange->PollStarted(&started); !status.ok()) {
    Break(Status(status.kind(), OperationName(*exchange) + " at " + LocalName() +
                                    ": its device is lost: " + status.message()));
    return false;
  }
  return started;
}

void Channel::AwaitQuiet(transport::Endpoint* endpoint, const Exchange& exchange) const {
  const TimePoint deadline = Clock::now() + context_->bounds.give_back;
  while (!endpoint->Quiet()) {
    if (Clock::now() > deadline) EndWith(exchange);
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void Channel::CheckGivenBack(TimePoint now, const Exchange* under_way) {
  // Several looks: a process that was stopped meanwhile gets time to go on.
  constexpr int kLooks = 3;
  const bool late = under_way != nullptr && context_->failure.has_adopted() &&
                    context_->failure.SinceAdoption(now) > context_->bounds.give_back;
  late_looks_ = late ? late_looks_ + 1 : 0;
  if (late_looks_ >= kLooks) EndWith(*under_way);
}

void Channel::EndWith(const Exchange& exchange) const {
  EndProcess(context_->failure.adopted(),
             OperationName(exchange) + " at " + LocalName() +
                 " has failed, but what it still does with the device's memory does not end: " +
                 kCopyStuck + "; the memory cannot be given back, so this process ends");
}

void Channel::Moved(size_t bytes) {
  if (bytes == 0) return;
  moved_.fetch_add(bytes, std::memory_order_relaxed);
  bytes_.fetch_add(bytes, std::memory_order_relaxed);
  NoteProgress();
}

void Channel::NoteProgress() {
  const int64_t now = Clock::now().time_since_epoch().count();
  last_progress_.store(now, std::memory_order_relaxed);
  progress_with_peer_->store(now, std::memory_order_relaxed);
}

Duration Channel::InsideStep(TimePoint now) {
  const uint64_t steps = ProxySteps();
  const bool inside = steps % 2 == 1;
  if (!inside || steps != seen_steps_) seen_steps_at_ = now;
  seen_steps_ = steps;
  return inside_step_ = now - seen_steps_at_;
}

Status Channel::Timeout(const Exchange& exchange, const char* verb, const char* preposition,
                        uint64_t moved, uint64_t total, Duration waited, bool under_way,
                        const char* hint) const {
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%.3g s", ToSeconds(waited));
  std::string text = OperationName(exchange) + ": " + LocalName() + " " + verb + " " +
                     std::to_string(moved) + " of " + std::to_string(total) + " bytes " +
                     preposition + " " + PeerName() + ", then ";
  text += under_way ? "nothing moved for " : "waited ";
  text += seconds;
  text += under_way ? " (HETCCL_TIMEOUT)" : " for it to begin (HETCCL_ARRIVAL_TIMEOUT)";
  if (inside_step_ > waited / 2) return Status(ErrorKind::kTimeout, text + "; " + kInsideDriver);
  if (copying_.load(std::memory_order_relaxed)) hint = kCopyStuck;
  return Status(ErrorKind::kTimeout, text + "; " + hint);
}

}  // namespace hetccl
