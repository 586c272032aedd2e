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
                         std::vector<std::unique_ptr<ReceiveWindow>> windows)
    : staging_(kStagingBytes) {
  for (size_t i = 0; i < sockets.size(); ++i) {
    lanes_.push_back({std::move(sockets[i]), std::move(windows[i])});
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
    if (staged_end_ - staged_begin_ < sizeof(header_)) FillStaging();
    if (staged_end_ - staged_begin_ < sizeof(header_)) return Status();
    std::memcpy(&header_, staging_.data() + staged_begin_, sizeof(header_));
    staged_begin_ += sizeof(header_);
    if (Status status = CheckHeader(header_); !status.ok()) return status;
    if (header_.type == MessageType::kGoodbye) {
      peer_ = PeerState::kGoodbye;
      return Status();
    }
    have_header_ = true;
  }
  *header = &header_;
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
  }
  if (total > kAcknowledgeAbove) {
    // If this cannot be sent the stream is broken or full, and reading will tell.
    (void)!::send(lanes_[0].fd.get(), &kAcknowledge, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
}

Status TcpReceiver::Step(Progress* progress) {
  *progress = {};
  DrainStaging(progress);
  progress->done = true;
  for (Lane& lane : lanes_) {
    StepLane(&lane, progress);
    // A copy that has ended just now makes room for bytes that are here already: no descriptor will
    // tell of those.
    progress->copying |= lane.payload->copying();
    if (Status status = lane.payload->Pump(); !status.ok()) return status;
    progress->copying |= lane.payload->copying();
    progress->done &= lane.payload->finished();
  }
  if (progress->done) have_header_ = false;
  return Status();
}

void TcpReceiver::DrainStaging(Progress* progress) {
  ReceiveWindow& payload = *lanes_[0].payload;
  iovec target;
  while (staged_begin_ < staged_end_ &&
         payload.Gather(staged_end_ - staged_begin_, &target, 1) == 1) {
    std::memcpy(target.iov_base, staging_.data() + staged_begin_, target.iov_len);
    payload.Advance(target.iov_len);
    staged_begin_ += target.iov_len;
    progress->bytes += target.iov_len;
  }
}

void TcpReceiver::StepLane(Lane* lane, Progress* progress) {
  size_t budget = kStepBytes;
  while (budget > 0 && peer_ != PeerState::kLost) {
    iovec pieces[kMaxPieces];
    msghdr message = {};
    message.msg_iov = pieces;
    message.msg_iovlen = lane->payload->Gather(budget, pieces, kMaxPieces);
    if (message.msg_iovlen == 0) return;
    const ssize_t count = ::recvmsg(lane->fd.get(), &message, MSG_DONTWAIT);
    if (count <= 0) {
      if (Retry(count)) continue;
      return;
    }
    lane->payload->Advance(count);
    progress->bytes += count;
    budget -= std::min(budget, static_cast<size_t>(count));
  }
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
