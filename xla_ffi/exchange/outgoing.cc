#include "xla_ffi/exchange/outgoing.h"

#include <algorithm>
#include <utility>

namespace hetccl {

using transport::MessageType;
using transport::Progress;
using transport::WireHeader;

OutgoingChannel::OutgoingChannel(std::shared_ptr<ChannelContext> context, uint32_t local_rank,
                                 uint32_t peer_rank, std::unique_ptr<transport::Sender> sender)
    : Channel(std::move(context), local_rank, peer_rank), sender_(std::move(sender)) {}

void OutgoingChannel::Post(std::shared_ptr<Exchange> exchange, transport::ConstPayload payload) {
  WireHeader header = transport::MakeHeader(MessageType::kData);
  header.epoch = context_->epoch;
  header.program = exchange->program();
  header.index = exchange->index();
  header.wire_id = exchange->plan().wire_id();
  for (const transport::ConstSpan& span : payload) header.payload_bytes += span.size;
  header.source = local_rank_;
  header.destination = peer_rank_;
  transport::SetText(&header, exchange->plan().text());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_) {
      header.occurrence = counter_.Next(header.program, header.index);
      queue_.push_back({std::move(exchange), header, std::move(payload), Clock::now()});
      exchange = nullptr;
    }
  }
  if (exchange) {
    exchange->PartEnded(/*failed=*/true);
  } else {
    Notify();
  }
}

OutgoingChannel::Next OutgoingChannel::TakeNext() {
  std::shared_ptr<Exchange> next;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_ || queue_.empty()) return Next::kNone;
    next = queue_.front().exchange;
  }
  if (!Started(next.get())) return broken_ ? Next::kNone : Next::kNotStarted;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return Next::kNone;
    current_ = std::move(queue_.front());  // only this thread takes from the queue
    queue_.pop_front();
    moved_.store(0, std::memory_order_relaxed);
    begun_.store(false, std::memory_order_relaxed);
  }
  sender_->Begin(current_->header, std::move(current_->payload));
  return Next::kTaken;
}

void OutgoingChannel::EndCurrent(bool failed) {
  std::shared_ptr<Exchange> exchange;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    exchange = std::move(current_->exchange);
    current_.reset();
    idle_since_ = Clock::now();
  }
  if (!failed) CountMessage();
  exchange->PartEnded(failed);
}

proxy::Pace OutgoingChannel::Step() {
  if (context_->failure.has_adopted()) {
    // The message is half sent, so nothing can follow it on this channel.
    broken_.store(true, std::memory_order_release);
    if (current_ && !sender_->Quiet()) return proxy::Pace::kPolling;
    if (current_) EndCurrent(/*failed=*/true);
  }
  if (broken_.load(std::memory_order_relaxed)) return proxy::Pace::kIdle;
  const Next next = current_.has_value() ? Next::kTaken : TakeNext();
  const bool working = next == Next::kTaken;
  Progress progress;
  if (Status status = sender_->Step(&progress); !status.ok()) {
    BreakWith(status, "sending to ", working ? current_->exchange.get() : nullptr);
    return proxy::Pace::kIdle;
  }
  Moved(progress.bytes);
  copying_.store(progress.copying, std::memory_order_relaxed);
  if (progress.done) {
    EndCurrent(/*failed=*/false);
    return proxy::Pace::kBusy;
  }
  if (progress.bytes > 0) return proxy::Pace::kBusy;
  if (working) begun_.store(sender_->peer_has_begun(), std::memory_order_relaxed);
  CheckPeer(*sender_, working ? current_->exchange.get() : nullptr);
  if (broken_) return proxy::Pace::kIdle;
  if (progress.copying || next == Next::kNotStarted) return proxy::Pace::kPolling;
  return working || sender_->unconfirmed() ? proxy::Pace::kWaiting : proxy::Pace::kIdle;
}

Status OutgoingChannel::Overdue(TimePoint now) const {
  // An own copy that is under way needs nothing of the peer.
  const bool begun =
      begun_.load(std::memory_order_relaxed) || copying_.load(std::memory_order_relaxed);
  const TimePoint progress{Duration(last_progress_.load(std::memory_order_relaxed))};
  const TimePoint since = std::max({current_->posted, current_->exchange->started_at(), idle_since_,
                                    begun ? progress : TimePoint()});
  const Bounds& bounds = context_->bounds;
  if (now - since < (begun ? bounds.progress : bounds.arrival)) return Status();
  return Timeout(*current_->exchange, "sent", "to", moved_.load(std::memory_order_relaxed),
                 current_->header.payload_bytes, now - since, begun,
                 begun ? "the peer or the network is stuck"
                       : "the peer has not reached this operation: it may still compile, be stuck, "
                         "or run another program");
}

void OutgoingChannel::CheckDeadlines(TimePoint now) {
  const Duration inside = InsideStep(now);
  Status timeout;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    CheckGivenBack(now, current_ ? current_->exchange.get() : nullptr);
    if (broken_.load(std::memory_order_relaxed) || (!current_ && queue_.empty())) return;
    if (inside >= context_->bounds.progress) {
      const Part& part = current_ ? *current_ : queue_.front();
      timeout = Timeout(*part.exchange, "sent", "to", current_ ? moved_.load() : 0,
                        part.header.payload_bytes, inside, /*under_way=*/true, "");
    } else if (current_) {
      timeout = Overdue(now);
    }
  }
  if (!timeout.ok()) context_->failure.Propose(timeout);
}

void OutgoingChannel::FailAll() {
  std::deque<Part> dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    dropped.swap(queue_);
  }
  for (Part& part : dropped) part.exchange->PartEnded(/*failed=*/true);
  Notify();
}

void OutgoingChannel::Describe(std::vector<PendingPart>* parts) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto line = [&](const Part& part, uint64_t moved) {
    parts->push_back({peer_rank_, part.exchange->program(),
                      OperationName(*part.exchange) + ": " + LocalName() + " has sent " +
                          std::to_string(moved) + " of " +
                          std::to_string(part.header.payload_bytes) + " bytes to " + PeerName()});
  };
  if (current_) line(*current_, moved_.load(std::memory_order_relaxed));
  for (const Part& part : queue_) line(part, 0);
}

std::string OutgoingChannel::OldestOperation() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (current_) return OperationName(*current_->exchange);
  return queue_.empty() ? "" : OperationName(*queue_.front().exchange);
}

void OutgoingChannel::Shutdown() {
  if (current_) {
    AwaitQuiet(sender_.get(), *current_->exchange);
    EndCurrent(/*failed=*/true);
  }
  sender_->SayGoodbye();
}

transport::Route OutgoingChannel::route() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return sender_ ? sender_->route() : transport::Route();
}

void OutgoingChannel::Release() {
  std::unique_ptr<transport::Sender> released;
  std::lock_guard<std::mutex> lock(mutex_);
  released.swap(sender_);  // ends behind the lock
}

}  // namespace hetccl
