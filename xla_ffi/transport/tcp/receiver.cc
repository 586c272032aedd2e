#include "xla_ffi/transport/tcp/receiver.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "xla_ffi/transport/tcp/lanes.h"

namespace hetccl::transport::tcp {
namespace {

constexpr size_t kStagingBytes = 16 * 1024;

}  // namespace

TcpReceiver::TcpReceiver(std::vector<std::unique_ptr<Stream>> streams,
                         std::vector<std::unique_ptr<ReceiveWindow>> windows, bool checksum)
    : staging_(kStagingBytes), header_bytes_(HeaderBytes(checksum)) {
  for (size_t i = 0; i < streams.size(); ++i) {
    lanes_.push_back({std::move(streams[i]), std::move(windows[i]), ReceiveSums(checksum)});
  }
}

bool TcpReceiver::Quiet() {
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [](Lane& lane) { return lane.payload->Quiet(); });
}

std::vector<int> TcpReceiver::poll_fds() const {
  std::vector<int> fds;
  for (const Lane& lane : lanes_) fds.push_back(lane.stream->fd());
  return fds;
}

Status TcpReceiver::Peek(const WireHeader** header) {
  *header = nullptr;
  if (!have_header_) {
    if (staged_end_ - staged_begin_ < header_bytes_) {
      if (Status status = FillStaging(); !status.ok()) return status;
    }
    if (staged_end_ - staged_begin_ < header_bytes_) return Status();
    std::memcpy(&header_, staging_.data() + staged_begin_, header_bytes_);
    staged_begin_ += header_bytes_;
    if (header_bytes_ > sizeof(WireHeader)) {
      if (Status status = CheckSum(header_); !status.ok()) return Named(0, status);
    }
    if (Status status = CheckHeader(header_.header); !status.ok()) return status;
    if (header_.header.type == MessageType::kGoodbye) {
      peer_ = PeerState::kGoodbye;
      return Status();
    }
    have_header_ = true;
  }
  *header = &header_.header;
  return Status();
}

Status TcpReceiver::FillStaging() {
  if (staged_begin_ > 0) {
    std::memmove(staging_.data(), staging_.data() + staged_begin_, staged_end_ - staged_begin_);
    staged_end_ -= staged_begin_;
    staged_begin_ = 0;
  }
  if (peer_ != PeerState::kAlive) return Status();
  const Moved read =
      lanes_[0].stream->Receive(staging_.data() + staged_end_, staging_.size() - staged_end_);
  if (read.how != Moved::How::kSome) return Nothing(0, read);
  staged_end_ += read.bytes;
  return Status();
}

void TcpReceiver::Accept(MutablePayload payload) {
  const size_t total = TotalSize(payload);
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const Stripe stripe = StripeOf(total, i, lanes_.size());
    lanes_[i].payload->Begin(Slice(payload, stripe.begin, stripe.end));
    lanes_[i].sums.Begin(stripe.end - stripe.begin);
  }
  if (total > kAcknowledgeAbove) {
    // If this cannot be sent the stream is broken or full, and reading will tell.
    (void)lanes_[0].stream->Send(&kAcknowledge, 1);
  }
}

Status TcpReceiver::Step(Progress* progress) {
  *progress = {};
  if (Status status = DrainStaging(progress); !status.ok()) return status;
  progress->done = true;
  for (size_t i = 0; i < lanes_.size(); ++i) {
    Lane& lane = lanes_[i];
    if (Status status = StepLane(i, progress); !status.ok()) return status;
    // A copy that has ended just now makes room for bytes that are here already: no descriptor will
    // tell of those.
    progress->copying |= lane.payload->copying();
    if (Status status = lane.payload->Pump(); !status.ok()) return status;
    progress->copying |= lane.payload->copying();
    progress->done &= lane.finished();
  }
  if (progress->done) have_header_ = false;
  return Status();
}

int TcpReceiver::Targets(Lane* lane, size_t limit, iovec* pieces, int capacity) {
  const int count = lane->payload->Gather(lane->sums.Limit(limit), pieces, capacity - 1);
  return lane->sums.Extend(pieces, count);
}

Status TcpReceiver::Take(size_t lane, const iovec* pieces, size_t bytes, Progress* progress) {
  size_t payload;
  if (Status status = lanes_[lane].sums.Received(pieces, bytes, &payload); !status.ok()) {
    return Named(lane, status);
  }
  lanes_[lane].payload->Advance(payload);
  progress->bytes += payload;
  return Status();
}

Status TcpReceiver::Named(size_t lane, const Status& status) const {
  return ChangedOnTheWay(lane, lanes_.size(), lanes_[lane].stream->fd(), status);
}

Status TcpReceiver::DrainStaging(Progress* progress) {
  while (staged_begin_ < staged_end_) {
    iovec pieces[2];
    const size_t staged = staged_end_ - staged_begin_;
    const int count = Targets(&lanes_[0], staged, pieces, 2);
    if (count == 0) break;
    const size_t bytes = std::min(staged, pieces[0].iov_len);
    std::memcpy(pieces[0].iov_base, staging_.data() + staged_begin_, bytes);
    staged_begin_ += bytes;
    if (Status status = Take(0, pieces, bytes, progress); !status.ok()) return status;
  }
  return Status();
}

Status TcpReceiver::StepLane(size_t index, Progress* progress) {
  Lane& lane = lanes_[index];
  size_t budget = kStepBytes;
  while (budget > 0 && peer_ != PeerState::kLost) {
    iovec pieces[kMaxPieces];
    const int targets = Targets(&lane, budget, pieces, kMaxPieces);
    if (targets == 0) return Status();
    const Moved read = lane.stream->Receive(pieces, targets);
    if (read.how != Moved::How::kSome) return Nothing(index, read);
    if (Status status = Take(index, pieces, read.bytes, progress); !status.ok()) return status;
    budget -= std::min(budget, read.bytes);
  }
  return Status();
}

Status TcpReceiver::Nothing(size_t lane, const Moved& moved) {
  switch (moved.how) {
    case Moved::How::kEnd:
      Lose("it closed the connection without a goodbye");
      return Status();
    case Moved::How::kBroken:
      Lose(moved.reason);
      return Status();
    case Moved::How::kForged:
      return Named(lane, Status(ErrorKind::kCorrupt, moved.reason));
    default:
      return Status();
  }
}

void TcpReceiver::Lose(std::string reason) {
  if (peer_ != PeerState::kAlive) return;
  peer_ = PeerState::kLost;
  lost_reason_ = std::move(reason);
}

void TcpReceiver::SayGoodbye() {
  (void)lanes_[0].stream->Send(&kGoodbyeByte, 1);
  for (const Lane& lane : lanes_) lane.stream->EndSending();
}

// Only a goodbye can be under way, and the end of the stream says nearly the same.
bool TcpReceiver::Drained() { return true; }

}  // namespace hetccl::transport::tcp
