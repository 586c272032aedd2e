#include "xla_ffi/exchange/incoming.h"

#include <algorithm>
#include <utility>

#include "xla_ffi/transport/span_cursor.h"

namespace hetccl {

using proxy::Pace;
using transport::Progress;
using transport::WireHeader;

void IncomingChannel::Attach(std::unique_ptr<transport::Receiver> receiver) {
  receiver_ = std::move(receiver);
  std::lock_guard<std::mutex> lock(mutex_);
  attached_ = true;
}

bool IncomingChannel::attached() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return attached_;
}

void IncomingChannel::Post(std::shared_ptr<Exchange> exchange, transport::MutablePayload payload) {
  const uint64_t bytes = transport::TotalSize(payload);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_) {
      const uint64_t occurrence = counter_.Next(exchange->program(), exchange->index());
      posted_.push_back({std::move(exchange), occurrence, bytes, std::move(payload), Clock::now()});
      exchange = nullptr;
    }
  }
  if (exchange) {
    exchange->PartEnded(/*failed=*/true);
  } else {
    Notify();
  }
}

Expected IncomingChannel::ExpectedOf(const Part& part) const {
  const Exchange& exchange = *part.exchange;
  return {context_->epoch,           exchange.program(), exchange.index(),       part.occurrence,
          exchange.plan().wire_id(), part.bytes,         &exchange.plan().text()};
}

Status IncomingChannel::Mismatch(const WireHeader& head, const Part& part,
                                 std::optional<Duration> waited) const {
  return Status(ErrorKind::kMismatch, DescribeMismatch(head, ExpectedOf(part), PeerName(),
                                                       LocalName(), context_->directory, waited));
}

Pace IncomingChannel::Step() {
  if (receiver_ == nullptr) return Pace::kIdle;
  if (context_->failure.has_adopted()) {
    broken_.store(true, std::memory_order_release);
    if (current_ && !receiver_->Quiet()) return Pace::kPolling;
    if (current_) EndCurrent(/*failed=*/true);
  }
  if (broken_.load(std::memory_order_relaxed)) return Pace::kIdle;
  if (current_) return StepCurrent();

  const WireHeader* head = nullptr;
  if (Status status = receiver_->Peek(&head); !status.ok()) {
    BreakWith(status, "receiving from ", nullptr);
    return Pace::kIdle;
  }
  if (head != nullptr) {
    const Found found = MatchHead(*head);
    if (found == Found::kCurrent) return StepCurrent();
    if (found == Found::kNotStarted) return Pace::kPolling;
    // Nothing to do until the next receive is posted.
    return Pace::kIdle;
  }
  std::shared_ptr<Exchange> oldest;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!posted_.empty()) oldest = posted_.front().exchange;
  }
  bool started = false;
  if (oldest && oldest->gate_asks_driver()) (void)oldest->PollStarted(&started).ok();
  CheckPeer(*receiver_, oldest.get());
  return oldest && !broken_ ? Pace::kWaiting : Pace::kIdle;
}

IncomingChannel::Found IncomingChannel::MatchHead(const WireHeader& head) {
  Status mismatch;
  std::shared_ptr<Exchange> match;
  size_t place = 0;  // in posted_, which only this thread takes from
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_ || posted_.empty()) return Found::kNothing;
    Verdict verdict = Verdict::kOtherProgram;
    for (; place < posted_.size(); ++place) {
      verdict = Judge(head, ExpectedOf(posted_[place]));
      if (verdict != Verdict::kOtherProgram) break;
    }
    if (verdict == Verdict::kOtherProgram) {
      if (!stranger_) stranger_ = Stranger{head, Clock::now()};
      return Found::kNothing;
    }
    stranger_.reset();
    if (verdict == Verdict::kMismatch) mismatch = Mismatch(head, posted_[place]);
    match = posted_[place].exchange;
  }
  if (!mismatch.ok()) {
    Break(std::move(mismatch));
    return Found::kBroken;
  }
  if (!Started(match.get())) return broken_ ? Found::kBroken : Found::kNotStarted;
  return MakeCurrent(place) ? Found::kCurrent : Found::kNothing;
}

bool IncomingChannel::MakeCurrent(size_t place) {
  transport::MutablePayload payload;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return false;
    const auto part = posted_.begin() + static_cast<std::ptrdiff_t>(place);
    payload = std::move(part->payload);
    overtaking_ = part != posted_.begin();
    current_ = std::move(*part);
    posted_.erase(part);
    moved_.store(0, std::memory_order_relaxed);
    NoteProgress();
  }
  receiver_->Accept(std::move(payload));
  return true;
}

Pace IncomingChannel::StepCurrent() {
  Progress progress;
  if (Status status = receiver_->Step(&progress); !status.ok()) {
    BreakWith(status, "receiving from ", current_->exchange.get());
    return Pace::kIdle;
  }
  Moved(progress.bytes);
  copying_.store(progress.copying, std::memory_order_relaxed);
  if (progress.done) {
    EndCurrent(/*failed=*/false);
    return Pace::kBusy;
  }
  if (progress.bytes > 0) return Pace::kBusy;
  if (progress.copying) return Pace::kPolling;
  CheckPeer(*receiver_, current_->exchange.get());
  return broken_ ? Pace::kIdle : Pace::kWaiting;
}

void IncomingChannel::EndCurrent(bool failed) {
  std::shared_ptr<Exchange> exchange;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    exchange = std::move(current_->exchange);
    current_.reset();
    if (!overtaking_ && !posted_.empty()) posted_.front().since = Clock::now();
  }
  if (!failed) CountMessage();
  exchange->PartEnded(failed);
}

Status IncomingChannel::OverdueCurrent(TimePoint now) const {
  const TimePoint since{Duration(last_progress_.load(std::memory_order_relaxed))};
  if (now - since < context_->bounds.progress) return Status();
  return Timeout(*current_->exchange, "received", "from", moved_.load(std::memory_order_relaxed),
                 current_->bytes, now - since, /*under_way=*/true,
                 "the peer or the network is stuck");
}

Status IncomingChannel::OverdueOldest(TimePoint now) const {
  const Part& oldest = posted_.front();
  const TimePoint started = oldest.exchange->started_at();
  if (started > now) return Status();  // its own device has not come to it
  const Duration waited = now - std::max(oldest.since, started);
  const bool overdue = waited >= context_->bounds.arrival;
  if (stranger_) {
    const TimePoint progress{Duration(progress_with_peer_->load(std::memory_order_relaxed))};
    const Duration silence = now - std::max(stranger_->since, progress);
    if (!overdue && silence < context_->bounds.mismatch_grace) return Status();
    return Mismatch(stranger_->header, oldest, now - stranger_->since);
  }
  if (!overdue) return Status();
  return Timeout(*oldest.exchange, "received", "from", /*moved=*/0, oldest.bytes, waited,
                 /*under_way=*/false,
                 attached_ ? "the peer has not reached this operation: it may still compile, be "
                             "stuck, or run another program"
                           : "the peer has not connected: it may still compile, be stuck, or run "
                             "another program");
}

void IncomingChannel::PollOldest() {
  std::shared_ptr<Exchange> oldest;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!posted_.empty()) oldest = posted_.front().exchange;
  }
  bool started = false;
  // A lost device shows when something is to be moved, with the operation's name. The watchdog must
  // get on whoever waits in a driver; there the proxy thread asks, a little later.
  if (oldest != nullptr && !oldest->gate_asks_driver()) (void)oldest->PollStarted(&started).ok();
}

void IncomingChannel::CheckDeadlines(TimePoint now) {
  PollOldest();
  const Duration inside = InsideStep(now);
  Status failure;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    CheckGivenBack(now, current_ ? current_->exchange.get() : nullptr);
    if (broken_.load(std::memory_order_relaxed) || closed_) return;
    if (inside >= context_->bounds.progress && (current_ || !posted_.empty())) {
      const Part& part = current_ ? *current_ : posted_.front();
      failure = Timeout(*part.exchange, "received", "from", current_ ? moved_.load() : 0,
                        part.bytes, inside, /*under_way=*/true, "");
    }
    if (failure.ok() && current_) failure = OverdueCurrent(now);
    if (failure.ok() && !posted_.empty() && (!current_ || overtaking_)) {
      failure = OverdueOldest(now);
    }
  }
  if (!failure.ok()) context_->failure.Propose(failure);
}

void IncomingChannel::FailAll() {
  std::deque<Part> dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    dropped.swap(posted_);
  }
  for (Part& part : dropped) part.exchange->PartEnded(/*failed=*/true);
  Notify();
}

void IncomingChannel::Describe(std::vector<PendingPart>* parts) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto line = [&](const Part& part, uint64_t moved) {
    parts->push_back({peer_rank_, part.exchange->program(),
                      OperationName(*part.exchange) + ": " + LocalName() + " has received " +
                          std::to_string(moved) + " of " + std::to_string(part.bytes) +
                          " bytes from " + PeerName() +
                          (attached_ ? "" : ", which has not connected")});
  };
  if (current_) line(*current_, moved_.load(std::memory_order_relaxed));
  for (const Part& part : posted_) line(part, 0);
}

std::string IncomingChannel::OldestOperation() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (current_) return OperationName(*current_->exchange);
  return posted_.empty() ? "" : OperationName(*posted_.front().exchange);
}

void IncomingChannel::Shutdown() {
  if (current_) {
    AwaitQuiet(receiver_.get(), *current_->exchange);
    EndCurrent(/*failed=*/true);
  }
  if (receiver_) receiver_->SayGoodbye();
}

transport::Route IncomingChannel::route() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return attached_ && receiver_ ? receiver_->route() : transport::Route();
}

void IncomingChannel::Release() {
  std::unique_ptr<transport::Receiver> released;
  std::lock_guard<std::mutex> lock(mutex_);
  released.swap(receiver_);  // ends behind the lock
}

}  // namespace hetccl
