#include "xla_ffi/exchange/channel_table.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace hetccl {

ChannelTable::ChannelTable(std::shared_ptr<ChannelContext> context, int proxy_threads,
                           Duration spin)
    : context_(std::move(context)) {
  context_->SetFindOperation([this](uint32_t peer_rank) { return OperationWith(peer_rank); });
  for (int i = 0; i < proxy_threads; ++i) {
    proxies_.push_back(std::make_unique<proxy::Proxy>("hetccl-proxy-" + std::to_string(i), spin));
  }
}

void ChannelTable::Start(const std::shared_ptr<Channel>& channel) {
  proxies_[next_proxy_++ % proxies_.size()]->Add(channel);
}

Status ChannelTable::AddOutgoing(uint32_t local_rank, uint32_t peer_rank,
                                 std::unique_ptr<transport::Sender> sender) {
  std::shared_ptr<OutgoingChannel> channel;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (shut_down_) return Status(ErrorKind::kAborted, "the world was shut down");
    auto& slot = outgoing_[{local_rank, peer_rank}];
    if (slot != nullptr) {
      return InternalError("the channel from " + context_->directory.Rank(local_rank) + " to " +
                           context_->directory.Rank(peer_rank) + " exists already");
    }
    channel = std::make_shared<OutgoingChannel>(context_, local_rank, peer_rank, std::move(sender));
    slot = channel;
    Start(channel);
  }
  if (context_->failure.has_adopted()) channel->FailAll();
  return Status();
}

Status ChannelTable::AddIncoming(uint32_t local_rank, uint32_t peer_rank,
                                 std::unique_ptr<transport::Receiver> receiver) {
  std::shared_ptr<IncomingChannel> channel;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (shut_down_) return Status(ErrorKind::kAborted, "the world was shut down");
    auto& slot = incoming_[{local_rank, peer_rank}];
    if (slot == nullptr) {
      slot = std::make_shared<IncomingChannel>(context_, local_rank, peer_rank);
    } else if (slot->attached()) {
      return InternalError("the channel from " + context_->directory.Rank(peer_rank) + " to " +
                           context_->directory.Rank(local_rank) + " exists already");
    }
    channel = slot;
    channel->Attach(std::move(receiver));
    Start(channel);
  }
  if (context_->failure.has_adopted()) channel->FailAll();
  return Status();
}

std::shared_ptr<OutgoingChannel> ChannelTable::Outgoing(uint32_t local_rank,
                                                        uint32_t peer_rank) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = outgoing_.find({local_rank, peer_rank});
  return it != outgoing_.end() ? it->second : nullptr;
}

std::shared_ptr<IncomingChannel> ChannelTable::Incoming(uint32_t local_rank, uint32_t peer_rank) {
  std::shared_ptr<IncomingChannel> channel;
  bool refuse = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& slot = incoming_[{local_rank, peer_rank}];
    if (slot == nullptr) {
      slot = std::make_shared<IncomingChannel>(context_, local_rank, peer_rank);
      refuse = shut_down_ || context_->failure.has_adopted();
    }
    channel = slot;
  }
  // Whoever adopted the failure or shut down may not have seen this channel.
  if (refuse) channel->FailAll();
  return channel;
}

std::vector<std::shared_ptr<OutgoingChannel>> ChannelTable::AllOutgoing() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<OutgoingChannel>> all;
  for (const auto& [key, channel] : outgoing_) all.push_back(channel);
  return all;
}

std::vector<std::shared_ptr<IncomingChannel>> ChannelTable::AllIncoming() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<IncomingChannel>> all;
  for (const auto& [key, channel] : incoming_) all.push_back(channel);
  return all;
}

std::vector<std::shared_ptr<Channel>> ChannelTable::All() const {
  std::vector<std::shared_ptr<Channel>> all;
  for (auto& channel : AllOutgoing()) all.push_back(std::move(channel));
  for (auto& channel : AllIncoming()) all.push_back(std::move(channel));
  return all;
}

std::string ChannelTable::OperationWith(uint32_t peer_rank) const {
  for (const std::shared_ptr<Channel>& channel : All()) {
    if (channel->peer_rank() != peer_rank) continue;
    if (std::string operation = channel->OldestOperation(); !operation.empty()) return operation;
  }
  return "";
}

int ChannelTable::Shutdown(TimePoint deadline) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (shut_down_) return 0;
    shut_down_ = true;
  }
  int stuck = 0;
  for (std::unique_ptr<proxy::Proxy>& proxy : proxies_) {
    const Duration left = deadline - Clock::now();
    if (!proxy->Stop(std::max(left, Duration(std::chrono::milliseconds(10))))) {
      ++stuck;
      (void)proxy.release();  // its thread still uses it
    }
  }
  context_->SetFindOperation(nullptr);  // a thread that is stuck may outlive this table
  if (stuck > 0) return stuck;          // the transports are not ours to touch
  const std::vector<std::shared_ptr<Channel>> channels = All();
  for (const std::shared_ptr<Channel>& channel : channels) channel->Shutdown();
  for (const std::shared_ptr<Channel>& channel : channels) {
    while (!channel->Drained() && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  for (const std::shared_ptr<Channel>& channel : channels) channel->Release();
  return 0;
}

}  // namespace hetccl
