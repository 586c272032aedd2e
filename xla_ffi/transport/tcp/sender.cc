#include "xla_ffi/transport/tcp/sender.h"

#include <algorithm>
#include <utility>

#include "xla_ffi/transport/tcp/lanes.h"

namespace hetccl::transport::tcp {

TcpSender::TcpSender(std::vector<std::unique_ptr<Stream>> streams,
                     std::vector<std::unique_ptr<SendWindow>> windows, bool checksum)
    : header_bytes_(HeaderBytes(checksum)) {
  for (size_t i = 0; i < streams.size(); ++i) {
    lanes_.push_back({std::move(streams[i]), std::move(windows[i]), SendSums(checksum)});
  }
}

bool TcpSender::Quiet() {
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [](Lane& lane) { return lane.payload->Quiet(); });
}

std::vector<int> TcpSender::poll_fds() const {
  std::vector<int> fds;
  for (const Lane& lane : lanes_) fds.push_back(lane.stream->fd());
  return fds;
}

void TcpSender::Begin(const WireHeader& header, ConstPayload payload) {
  header_ = header_bytes_ > sizeof(header) ? Checked(header) : CheckedHeader{header};
  header_left_ = header_bytes_;
  busy_ = true;
  const size_t total = TotalSize(payload);
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const Stripe stripe = StripeOf(total, i, lanes_.size());
    lanes_[i].payload->Begin(Slice(payload, stripe.begin, stripe.end));
    lanes_[i].sums.Begin(stripe.end - stripe.begin);
  }
  wants_acknowledgement_ = total > kAcknowledgeAbove;
  if (wants_acknowledgement_) {
    ++large_begun_;
    ReadBackwards();  // old acknowledgements must not pile up in the socket
  }
}

bool TcpSender::peer_has_begun() const {
  return wants_acknowledgement_ && acknowledged_ >= large_begun_;
}

Status TcpSender::Step(Progress* progress) {
  *progress = {};
  if (peer_ == PeerState::kLost) return forged_;
  bool header_moved = false;
  if (busy_) {
    const size_t header_left = header_left_;
    for (Lane& lane : lanes_) {
      if (Status status = lane.payload->Pump(); !status.ok()) return status;
      progress->copying |= lane.payload->copying();
    }
    for (size_t i = 0; i < lanes_.size() && peer_ == PeerState::kAlive; ++i) {
      StepLane(i, progress);
      if (header_left_ > 0) break;  // the other lanes' bytes mean nothing before the header
    }
    header_moved = header_left != header_left_;
    progress->done =
        header_left_ == 0 &&
        std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.finished(); });
    if (progress->done) busy_ = false;
  }
  if (!progress->done && progress->bytes == 0 && !header_moved) ReadBackwards();
  return forged_;
}

void TcpSender::StepLane(size_t index, Progress* progress) {
  Lane& lane = lanes_[index];
  size_t budget = kStepBytes;
  while (budget > 0) {
    iovec pieces[kMaxPieces + 1];  // and a checksum
    int count = 0;
    const size_t header_left = index == 0 ? header_left_ : 0;
    if (header_left > 0) {
      pieces[count++] = {reinterpret_cast<char*>(&header_) + header_bytes_ - header_left,
                         header_left};
    }
    iovec* of_lane = pieces + count;
    const int gathered = lane.payload->Gather(lane.sums.Limit(budget), of_lane, kMaxPieces - count);
    count += lane.sums.Cover(of_lane, gathered);
    if (count == 0) return;
    const Moved sent = lane.stream->Send(pieces, count);
    if (sent.how == Moved::How::kForged) return Distrust(index, sent.reason);
    if (sent.how == Moved::How::kNothing) return;
    if (sent.how != Moved::How::kSome) {
      ReadBackwards();  // a goodbye explains a closed stream
      if (peer_ == PeerState::kAlive) Lose(sent.reason);
      return;
    }
    const size_t of_header = std::min(header_left, sent.bytes);
    header_left_ -= of_header;
    const size_t of_payload = lane.sums.Sent(sent.bytes - of_header);
    lane.payload->Advance(of_payload);
    progress->bytes += of_payload;
    budget -= std::min(budget, sent.bytes);
  }
}

void TcpSender::ReadBackwards() {
  char bytes[64];
  while (peer_ == PeerState::kAlive) {
    const Moved read = lanes_[0].stream->Receive(bytes, sizeof(bytes));
    switch (read.how) {
      case Moved::How::kSome:
        break;
      case Moved::How::kNothing:
        return;
      case Moved::How::kEnd:
        return Lose("it closed the connection without a goodbye");
      case Moved::How::kBroken:
        return Lose(read.reason);
      case Moved::How::kForged:
        return Distrust(0, read.reason);
    }
    for (size_t i = 0; i < read.bytes; ++i) {
      if (bytes[i] == kAcknowledge) ++acknowledged_;
      if (bytes[i] == kGoodbyeByte) peer_ = PeerState::kGoodbye;
    }
  }
}

void TcpSender::Lose(std::string reason) {
  peer_ = PeerState::kLost;
  lost_reason_ = std::move(reason);
}

void TcpSender::Distrust(size_t lane, const std::string& reason) {
  Lose(reason);
  forged_ = ChangedOnTheWay(lane, lanes_.size(), lanes_[lane].stream->fd(),
                            Status(ErrorKind::kCorrupt, reason));
}

void TcpSender::SayGoodbye() {
  if (!busy_ && peer_ == PeerState::kAlive) {
    const CheckedHeader goodbye = Checked(MakeHeader(MessageType::kGoodbye));
    // A full buffer means that the peer is not reading; it will see the end of the stream instead.
    (void)lanes_[0].stream->Send(&goodbye, header_bytes_);
  }
  for (const Lane& lane : lanes_) lane.stream->EndSending();
}

// Closing a socket whose peer still sends makes the kernel drop what it has not delivered yet.
bool TcpSender::Drained() {
  if (peer_ == PeerState::kLost) return true;
  bool drained = true;
  for (const Lane& lane : lanes_) drained &= lane.stream->Drained();
  return drained;
}

}  // namespace hetccl::transport::tcp
