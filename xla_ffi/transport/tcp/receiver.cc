#include "xla_ffi/transport/tcp/receiver.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "xla_ffi/transport/tcp/lanes.h"

namespace hetccl::transport::tcp {
namespace {

constexpr size_t kStagingBytes = 16 * 1024;
constexpr int kMaxPieces = 16;

}  // namespace

TcpReceiver::TcpReceiver(std::vector<UniqueFd> sockets,
                         std::vector<std::unique_ptr<ReceiveWindow>> windows, bool checksum)
    : staging_(kStagingBytes), header_bytes_(HeaderBytes(checksum)) {
  for (size_t i = 0; i < sockets.size(); ++i) {
    lanes_.push_back({std::move(sockets[i]), std::move(windows[i]), ReceiveSums(checksum)});
  }
}

bool TcpReceiver::Quiet() {
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [](Lane& lane) { return lane.payload->Quiet(); });
}

std::vector<int> TcpReceiver::poll_fds() const {
  std::vector<int> fds;
  for (const Lane& lane : lanes_) fds.push_back(lane.fd.get());
  return fds;
}

Status TcpReceiver::Peek(const WireHeader** header) {
  *header = nullptr;
  if (!have_header_) {
    if (staged_end_ - staged_begin_ < header_bytes_) FillStaging();
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

void TcpReceiver::FillStaging() {
  if (staged_begin_ > 0) {
    std::memmove(staging_.data(), staging_.data() + staged_begin_, staged_end_ - staged_begin_);
    staged_end_ -= staged_begin_;
    staged_begin_ = 0;
  }
  while (peer_ == PeerState::kAlive) {
    const ssize_t count = ::recv(lanes_[0].fd.get(), staging_.data() + staged_end_,
                                 staging_.size() - staged_end_, MSG_DONTWAIT);
    if (count > 0) {
      staged_end_ += count;
      return;
    }
    if (!Retry(count)) return;
  }
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
    (void)!::send(lanes_[0].fd.get(), &kAcknowledge, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
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
  std::string link = "stripe " + std::to_string(lane + 1) + " of " + std::to_string(lanes_.size());
  const std::string path = PathName(lanes_[lane].fd.get());
  if (!path.empty()) link += ", " + path;
  return Status(status.kind(), "data was changed on the way (" + link + "): " + status.message() +
                                   "; look for a faulty network device, cable or memory between "
                                   "these two hosts");
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
    msghdr message = {};
    message.msg_iov = pieces;
    message.msg_iovlen = Targets(&lane, budget, pieces, kMaxPieces);
    if (message.msg_iovlen == 0) return Status();
    const ssize_t count = ::recvmsg(lane.fd.get(), &message, MSG_DONTWAIT);
    if (count <= 0) {
      if (Retry(count)) continue;
      return Status();
    }
    if (Status status = Take(index, pieces, count, progress); !status.ok()) return status;
    budget -= std::min(budget, static_cast<size_t>(count));
  }
  return Status();
}

bool TcpReceiver::Retry(ssize_t result) {
  if (result == 0) {
    Lose("it closed the connection without a goodbye");
    return false;
  }
  if (errno == EINTR) return true;
  if (errno != EAGAIN && errno != EWOULDBLOCK) {
    Lose(ErrnoMessage("the connection to it broke", errno));
  }
  return false;
}

void TcpReceiver::Lose(std::string reason) {
  if (peer_ != PeerState::kAlive) return;
  peer_ = PeerState::kLost;
  lost_reason_ = std::move(reason);
}

void TcpReceiver::SayGoodbye() {
  (void)!::send(lanes_[0].fd.get(), &kGoodbyeByte, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
  for (const Lane& lane : lanes_) ::shutdown(lane.fd.get(), SHUT_WR);
}

// Only a goodbye can be under way, and the end of the stream says nearly the same.
bool TcpReceiver::Drained() { return true; }

}  // namespace hetccl::transport::tcp
