#include "xla_ffi/exchange/engine.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "xla_ffi/exchange/end_process.h"

namespace hetccl {
namespace {

// Exchange ids are unique in the process, so that a ticket of a former world is never mistaken.
std::atomic<uint64_t> next_exchange_id{1};

int ProxyThreads(int wanted) {
  if (wanted > 0) return wanted;
  // Two threads saturate one device's link; the other cores belong to XLA.
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(cores / 2, 1, 4);
}

// Often enough to be within a tenth of every bound, rarely enough to cost nothing.
Duration WatchInterval(const EngineOptions& options) {
  const double shortest = std::min({options.timeout_s, options.arrival_timeout_s,
                                    options.mismatch_grace_s, options.abort_grace_s});
  return Seconds(std::clamp(shortest / 10, 0.005, 0.25));
}

template <typename Span>
std::vector<Span> Spans(const PlanMessage& message, const std::vector<BufferView>& buffers) {
  std::vector<Span> spans;
  for (const PeerRange& range : message.ranges) {
    std::byte* data = buffers[range.buffer].data + range.offset;
    if (!spans.empty() && spans.back().data + spans.back().size == data) {
      spans.back().size += range.bytes;
    } else if (range.bytes > 0) {
      spans.push_back({data, range.bytes});
    }
  }
  return spans;
}

}  // namespace

Engine::Engine(const EngineOptions& options)
    : options_(options),
      host_(options.copy_threads),
      context_(std::make_shared<ChannelContext>(
          options.epoch,
          Bounds{Seconds(options.timeout_s), Seconds(options.arrival_timeout_s),
                 Seconds(options.mismatch_grace_s), Seconds(options.give_back_s)},
          Seconds(options.abort_grace_s))),
      pool_(std::make_shared<ElasticPool>("hetccl-done")),
      in_flight_(std::make_shared<std::atomic<int64_t>>(0)),
      channels_(context_, ProxyThreads(options.proxy_threads), Seconds(options.spin_us * 1e-6)) {
  watchdog_ = std::make_unique<Watchdog>(WatchInterval(options), [this] { Watch(); });
}

Engine::~Engine() { (void)Close(std::chrono::seconds(5)).ok(); }

Status Engine::SetLocalDevice(int device_ordinal, uint32_t rank,
                              std::shared_ptr<device::StreamSpace> gpu) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [ordinal, other] : local_devices_) {
    if (gpu == nullptr || other.gpu == nullptr || ordinal == device_ordinal) continue;
    if (gpu->sync() != device::StreamSync::kHostFunc) continue;
    return InternalError(
        "with host functions (HETCCL_STREAM_SYNC=hostfunc, or a device without stream memory "
        "operations) a process can have one GPU: run one process for each GPU");
  }
  // No exchange whose program has come to it lasts longer.
  if (gpu) gpu->SetHoldBound(Seconds(options_.arrival_timeout_s + options_.timeout_s + 30));
  local_devices_[device_ordinal] = {rank, std::move(gpu)};
  return Status();
}

device::Space& Engine::SpaceOf(uint32_t rank) {
  if (const auto gpu = GpuOf(rank)) return *gpu;  // lives for ever
  return host_;
}

std::shared_ptr<device::StreamSpace> Engine::GpuOf(uint32_t rank) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [ordinal, device] : local_devices_) {
    if (device.rank == rank) return device.gpu;
  }
  return nullptr;
}

bool Engine::HasGpu() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(local_devices_.begin(), local_devices_.end(),
                     [](const auto& device) { return device.second.gpu != nullptr; });
}

std::shared_ptr<device::StreamSpace> Engine::Gpu(int device_ordinal) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = local_devices_.find(device_ordinal);
  return it != local_devices_.end() ? it->second.gpu : nullptr;
}

Status Engine::AddPlan(uint64_t id, std::string text, uint64_t wire_id, int device_ordinal,
                       const std::vector<PeerRange>& sends, const std::vector<PeerRange>& receives,
                       std::vector<ZeroRange> zeros) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto device = local_devices_.find(device_ordinal);
  if (device == local_devices_.end()) {
    return InternalError("plan of " + text + ": device ordinal " + std::to_string(device_ordinal) +
                         " has no rank; call set_local_device first");
  }
  auto plan = std::make_shared<const DevicePlan>(id, std::move(text), wire_id, device->second.rank,
                                                 sends, receives, std::move(zeros));
  auto& slot = plans_[{id, device_ordinal}];
  if (slot == nullptr) {
    slot = std::move(plan);
  } else if (!slot->SameAs(*plan)) {
    return InternalError("plan " + std::to_string(id) + " was added before as " + slot->text() +
                         " and now differs as " + plan->text() + "; plan ids must be unique");
  }
  return Status();
}

std::shared_ptr<const DevicePlan> Engine::FindPlan(uint64_t id, int device_ordinal) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = plans_.find({id, device_ordinal});
  return it != plans_.end() ? it->second : nullptr;
}

Status Engine::CheckAfterFailure(uint64_t program) {
  const TimePoint now = Clock::now();
  TimePoint since;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    since = failing_since_.try_emplace(program, now).first->second;
  }
  if (now - since < Seconds(options_.timeout_s)) return Status();
  return failure();
}

Status Engine::Start(const StartRequest& request, Ticket* ticket) {
  *ticket = {};
  if (closed_.load(std::memory_order_acquire)) {
    return Status(ErrorKind::kAborted,
                  "this world was shut down; programs compiled for it cannot run any more");
  }
  std::shared_ptr<const DevicePlan> plan = FindPlan(request.plan, request.device_ordinal);
  if (plan == nullptr) {
    return InternalError("no plan " + std::to_string(request.plan) + " for device ordinal " +
                         std::to_string(request.device_ordinal) +
                         " in this world; the program was compiled for another world or process: "
                         "clear JAX's caches (jax.clear_caches()) and trace it again");
  }
  if (Status status = plan->Check(request.sends, request.receives); !status.ok()) return status;
  if (context_->failure.has_adopted()) {
    ticket->failed = true;
    return CheckAfterFailure(request.program);
  }
  const std::shared_ptr<device::StreamSpace> gpu = Gpu(request.device_ordinal);
  device::Space& space = gpu ? static_cast<device::Space&>(*gpu) : host_;
  if (gpu) {
    if (const auto dead =
            on_streams_.DropDead(request.device_ordinal, request.sends, request.receives)) {
      const Status status = InternalError(
          dead->plan().text() + " at " + context_->directory.Rank(dead->plan().rank()) +
          ": its program ended between start and done (see the program's own error), and another "
          "program already uses the memory that the exchange still moves");
      context_->failure.Propose(status);
      return status;
    }
  }
  for (const ZeroRange& zero : plan->zeros()) {
    std::byte* data = request.receives[zero.buffer].data + zero.offset;
    if (Status status = space.Zero(data, zero.bytes, request.queue); !status.ok()) return status;
  }
  std::shared_ptr<device::Gate> gate;
  if (Status status = space.MarkStart(request.queue, &gate); !status.ok()) return status;
  auto exchange = std::make_shared<Exchange>(
      next_exchange_id.fetch_add(1, std::memory_order_relaxed), std::move(plan), request.program,
      request.index, pool_, in_flight_);
  exchange->SetGate(std::move(gate));
  for (const BufferView& buffer : request.receives) {
    space.Expect(buffer.data, buffer.bytes);
    exchange->receive_addresses.push_back(buffer.data);
  }
  for (const BufferView& buffer : request.sends) exchange->send_addresses.push_back(buffer.data);
  ticket->id = exchange->id();
  if (gpu) {
    on_streams_.Add(request.device_ordinal, exchange, request.sends, request.receives);
  } else {
    std::lock_guard<std::mutex> lock(mutex_);
    started_[exchange->id()] = exchange;
  }
  Post(exchange, request);
  return Status();
}

void Engine::Post(const std::shared_ptr<Exchange>& exchange, const StartRequest& request) {
  const DevicePlan& plan = exchange->plan();
  for (const PlanMessage& message : plan.receives()) {
    exchange->AddPart();
    channels_.Incoming(plan.rank(), message.peer)
        ->Post(exchange, Spans<transport::MutableSpan>(message, request.receives));
  }
  for (const PlanMessage& message : plan.sends()) {
    std::shared_ptr<OutgoingChannel> channel = channels_.Outgoing(plan.rank(), message.peer);
    if (channel == nullptr) {
      // An error here would end this device's program alone and leave its siblings waiting in
      // local collectives, so it becomes the world's failure.
      context_->failure.Propose(InternalError(
          plan.text() + ": no channel from " + context_->directory.Rank(plan.rank()) + " to " +
          context_->directory.Rank(message.peer) + " was opened before the program ran"));
      PostOrphan(exchange);
      continue;
    }
    exchange->AddPart();
    channel->Post(exchange, Spans<transport::ConstSpan>(message, request.sends));
  }
  exchange->PartEnded(/*failed=*/false);
}

void Engine::PostOrphan(const std::shared_ptr<Exchange>& exchange) {
  exchange->AddPart();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    orphans_.push_back(exchange);
  }
  if (context_->failure.has_adopted()) EndOrphans();
}

void Engine::EndOrphans() {
  std::vector<std::shared_ptr<Exchange>> ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ended.swap(orphans_);
  }
  for (const std::shared_ptr<Exchange>& exchange : ended) exchange->PartEnded(/*failed=*/true);
}

std::shared_ptr<Exchange> Engine::Take(uint64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = started_.find(id);
  if (it == started_.end()) return nullptr;
  std::shared_ptr<Exchange> exchange = std::move(it->second);
  started_.erase(it);
  return exchange;
}

bool Engine::PeersConnected(const DevicePlan& plan) {
  return std::all_of(plan.receives().begin(), plan.receives().end(), [&](const auto& message) {
    return channels_.Incoming(plan.rank(), message.peer)->attached();
  });
}

std::optional<Status> Engine::WaitFailure(Duration bound) {
  return context_->failure.WaitCandidate(bound);
}

void Engine::Abort(const Status& status) {
  if (!context_->failure.Adopt(status)) return;
  for (const std::shared_ptr<Channel>& channel : channels_.All()) channel->FailAll();
  EndOrphans();
}

void Engine::Watch() {
  const TimePoint now = Clock::now();
  for (const std::shared_ptr<Channel>& channel : channels_.All()) channel->CheckDeadlines(now);
  if (auto overdue = context_->failure.OverdueCandidate(now)) Abort(*overdue);
}

EngineStats Engine::Stats() const {
  EngineStats stats;
  for (const auto& channel : channels_.AllOutgoing()) {
    PeerStats& peer = stats.peers[channel->peer_rank()];
    peer.bytes_sent += channel->bytes();
    peer.messages_sent += channel->messages();
  }
  for (const auto& channel : channels_.AllIncoming()) {
    PeerStats& peer = stats.peers[channel->peer_rank()];
    peer.bytes_received += channel->bytes();
    peer.messages_received += channel->messages();
  }
  const auto note = [&](const Channel& channel, bool outgoing) {
    transport::Route route = channel.route();
    if (route.device.empty()) return;
    stats.routed.push_back({channel.local_rank(), channel.peer_rank(), outgoing, std::move(route)});
  };
  for (const auto& channel : channels_.AllOutgoing()) note(*channel, true);
  for (const auto& channel : channels_.AllIncoming()) note(*channel, false);
  stats.in_flight = in_flight_->load();
  stats.copied = copied_.load(std::memory_order_relaxed);
  stats.proxy_threads = channels_.proxy_threads();
  stats.completion_threads = static_cast<int>(pool_->size());
  stats.copy_threads = static_cast<int>(host_.Stats().at("copy_threads"));
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [ordinal, local] : local_devices_) {
    if (local.gpu == nullptr) continue;
    stats.devices[ordinal] = {local.gpu->platform(), local.gpu->name(), local.gpu->Stats()};
  }
  return stats;
}

std::vector<PendingPart> Engine::Pending() const {
  std::vector<PendingPart> parts;
  for (const std::shared_ptr<Channel>& channel : channels_.All()) channel->Describe(&parts);
  return parts;
}

Status Engine::Close(Duration bound) {
  std::lock_guard<std::mutex> lock(close_mutex_);
  if (closed_.exchange(true)) return Status();
  const TimePoint deadline = Clock::now() + bound;
  // Also when nothing is under way: a Start that has passed its check of closed_ may still post.
  std::string text = "the world was shut down";
  if (const int64_t count = in_flight_->load(); count > 0) {
    text += " while " + std::to_string(count) + " exchanges were under way";
  }
  context_->closing.store(true);
  Abort(Status(ErrorKind::kAborted, std::move(text)));
  watchdog_->Stop();
  for (const std::shared_ptr<Channel>& channel : channels_.All()) channel->FailAll();
  const int stuck_proxies = channels_.Shutdown(deadline);
  if (stuck_proxies == 0) host_.Close();
  if (stuck_proxies > 0 && in_flight_->load() > 0 && HasGpu()) {
    // Nobody would end the exchanges of a thread that comes back only now.
    EndProcess(failure(), std::to_string(stuck_proxies) +
                              " threads of jax_hetccl are inside the GPU's driver, which does not "
                              "return, and streams may wait for them, so this process ends");
  }
  const Duration left = std::max(deadline - Clock::now(), Duration(std::chrono::milliseconds(50)));
  const int stuck_completions = pool_->Shutdown(left);
  context_->failure.Close();
  if (stuck_proxies + stuck_completions == 0) return Status();
  return InternalError(
      std::to_string(stuck_proxies) + " proxy and " + std::to_string(stuck_completions) +
      " completion threads did not end within " + std::to_string(ToSeconds(bound)) + " s");
}

}  // namespace hetccl
