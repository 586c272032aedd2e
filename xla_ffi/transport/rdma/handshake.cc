#include "xla_ffi/transport/rdma/handshake.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

namespace hetccl::transport::rdma {
namespace {

// The sender's last word comes at once, unless its process is stopped; its death shows at the
// socket.
constexpr Duration kLastWordBound = std::chrono::seconds(60);

// Between two looks at the completion queue.
constexpr int kLookMs = 1;

constexpr char kReady = 'R';
constexpr char kWorks = 'K';
constexpr char kFails = 'F';

Status Wait(int socket, short events, TimePoint deadline, Duration bound, const char* what) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) {
      return InternalError(std::string("the peer did not ") + what + " within " +
                           std::to_string(static_cast<int>(ToSeconds(bound))) + " s");
    }
    pollfd polled = {socket, events, 0};
    const int ready = ::poll(&polled, 1, static_cast<int>(left.count()));
    if (ready > 0) return Status();
    if (ready < 0 && errno != EINTR) return InternalError(ErrnoMessage("poll", errno));
  }
}

Status Send(int socket, const void* data, size_t bytes) {
  const TimePoint deadline = Clock::now() + kHandshakeBound;
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(socket, at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      at += sent;
      bytes -= static_cast<size_t>(sent);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      Status status =
          Wait(socket, POLLOUT, deadline, kHandshakeBound, "take the handshake's bytes");
      if (!status.ok()) return status;
    } else if (errno != EINTR) {
      return InternalError(ErrnoMessage("the connection broke during the handshake", errno));
    }
  }
  return Status();
}

Status Receive(int socket, void* data, size_t bytes, const char* what,
               Duration bound = kHandshakeBound) {
  const TimePoint deadline = Clock::now() + bound;
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t count = ::recv(socket, at, bytes, MSG_DONTWAIT);
    if (count > 0) {
      at += count;
      bytes -= static_cast<size_t>(count);
    } else if (count == 0) {
      return InternalError("the peer closed the connection during the handshake");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (Status status = Wait(socket, POLLIN, deadline, bound, what); !status.ok()) return status;
    } else if (errno != EINTR) {
      return InternalError(ErrnoMessage("the connection broke during the handshake", errno));
    }
  }
  return Status();
}

// The reason behind the peer's 'F'.
Status ReceiveReason(int socket) {
  unsigned char size = 0;
  char text[256] = {};
  if (!Receive(socket, &size, 1, "say why").ok() || !Receive(socket, text, size, "say why").ok()) {
    return InternalError("the peer's handshake failed");
  }
  return InternalError("at the peer: " + std::string(text, size));
}

// Waits a little for the peer's verdict, and fails if that is the end. Leaves a good one where it
// is.
Status LookForTheEnd(int socket, bool* said) {
  pollfd polled = {socket, POLLIN, 0};
  // Once it has spoken the socket stays readable.
  if (::poll(&polled, *said ? 0 : 1, kLookMs) <= 0) return Status();
  char verdict = 0;
  const ssize_t count = ::recv(socket, &verdict, 1, MSG_PEEK | MSG_DONTWAIT);
  if (count == 0) return InternalError("the peer closed the connection during the handshake");
  if (count < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return Status();
    return InternalError(ErrnoMessage("the connection broke during the handshake", errno));
  }
  *said = true;
  if (verdict != kFails) return Status();
  (void)Receive(socket, &verdict, 1, "").ok();
  return ReceiveReason(socket);
}

// One write each way.
Status Probe(int socket, QueuePair* queue_pair, const void* probe, uint32_t lkey,
             const EndpointRecord& theirs, Duration bound) {
  Write write = {probe, lkey, 8, theirs.address + kProbeOffset, theirs.rkey};
  write.has_immediate = true;
  write.immediate = Pack(Immediate::kProbe, 0);
  if (Status status = queue_pair->Post(write); !status.ok()) return status;
  bool sent = false, received = false, said = false;
  std::vector<Completion> completions;
  const TimePoint deadline = Clock::now() + bound;
  while (!sent || !received) {
    completions.clear();
    if (Status status = queue_pair->Poll(&completions); !status.ok()) return status;
    for (const Completion& completion : completions) {
      sent |= !completion.receive;
      if (!completion.receive) continue;
      if (KindOf(completion.immediate) != Immediate::kProbe) {
        return InternalError(queue_pair->where() + ": the peer did not begin with a probe");
      }
      received = true;
    }
    if (Clock::now() > deadline) {
      return InternalError(
          queue_pair->where() + ": a probe of 8 bytes " +
          (sent ? "from the peer did not arrive" : "to the peer was not acknowledged") +
          " within " + std::to_string(static_cast<int>(ToSeconds(bound))) +
          " s; is there a route between the two NICs, and RoCE (UDP port 4791) "
          "let through?");
    }
    if (!completions.empty()) continue;
    if (Status end = LookForTheEnd(socket, &said); !end.ok()) {
      // What the NIC says here is the better reason.
      Status status = queue_pair->Poll(&completions);
      return status.ok() ? end : status;
    }
  }
  return queue_pair->PostReceives(1);
}

// Fails with `mine`, of which the peer is told.
Status GiveUp(int socket, const Status& mine) {
  const std::string text = mine.message().substr(0, 255);
  const std::string verdict = std::string(1, kFails) + static_cast<char>(text.size()) + text;
  char theirs = 0;
  // Closing while the peer still sends would make a TCP drop what it was told.
  if (Send(socket, verdict.data(), verdict.size()).ok()) (void)Receive(socket, &theirs, 1, "").ok();
  return mine;
}

Status ReceiveVerdict(int socket, Duration bound) {
  char theirs = 0;
  Status status = Receive(socket, &theirs, 1, "say that RDMA works", bound);
  if (!status.ok()) return status;
  if (theirs == kFails) return ReceiveReason(socket);
  return theirs == kWorks ? Status() : InternalError("the peer's handshake is not that of wire.h");
}

// Behind a probe that worked; the peer's may still take `bound`. The sender decides: once it has
// said that the channel is there nothing can fail at it any more, so the receiver waits for its
// word as long as the socket lives.
Status Agree(int socket, Role mine, Duration bound) {
  if (mine == Role::kSender) {
    Status status = ReceiveVerdict(socket, bound + kHandshakeBound);
    return status.ok() ? Send(socket, &kWorks, 1) : status;
  }
  if (Status status = Send(socket, &kWorks, 1); !status.ok()) return status;
  return ReceiveVerdict(socket, bound + kLastWordBound);
}

Status Meet(int socket, const Options& options, QueuePair* queue_pair, const EndpointRecord& mine,
            const void* probe, uint32_t probe_lkey, EndpointRecord* theirs) {
  // A peer that refuses may have closed already, and its reason is worth more than that.
  const Status sent = Send(socket, &mine, sizeof(mine));
  Status status =
      Receive(socket, theirs, sizeof(*theirs), "send its endpoint record", options.patience);
  if (!sent.ok() && !status.ok()) return sent;
  if (status.ok()) status = CheckRecord(*theirs, mine.role);
  if (!status.ok()) return status;
  status = queue_pair->Connect(mine, *theirs);
  if (!status.ok()) return GiveUp(socket, status);
  if (status = Send(socket, &kReady, 1); !status.ok()) return status;
  char ready = 0;
  status = Receive(socket, &ready, 1, "get its queue pair ready");
  if (!status.ok()) return status;
  if (ready == kFails) return ReceiveReason(socket);
  if (ready != kReady) return InternalError("the peer's handshake is not that of wire.h");
  const Duration bound = ProbeBound(options.timeout);
  status = Probe(socket, queue_pair, probe, probe_lkey, *theirs, bound);
  return status.ok() ? Agree(socket, mine.role, bound) : GiveUp(socket, status);
}

}  // namespace

Duration ProbeBound(int timeout) {
  constexpr Duration kMost = std::chrono::seconds(60);
  const Duration bound = 2 * 4 * std::chrono::nanoseconds(4096) * (int64_t{1} << timeout);
  return std::clamp<Duration>(bound, kHandshakeBound, kMost);
}

Status Handshake(int socket, const Options& options, QueuePair* queue_pair,
                 const EndpointRecord& mine, const void* probe, uint32_t probe_lkey,
                 EndpointRecord* theirs) {
  const Status status = Meet(socket, options, queue_pair, mine, probe, probe_lkey, theirs);
  // What the queue pair reports names itself already.
  if (status.ok() || status.message().rfind(queue_pair->where(), 0) == 0) return status;
  return Status(status.kind(), queue_pair->where() + ": " + status.message());
}

void Refuse(int socket, const Options& options, Role mine, const std::string& reason) {
  EndpointRecord record;
  record.record_bytes = sizeof(record);
  record.role = mine;
  record.error = 1;
  std::memcpy(record.text, reason.data(), std::min(reason.size(), sizeof(record.text) - 1));
  EndpointRecord theirs;
  if (!Send(socket, &record, sizeof(record)).ok()) return;
  // As above, so that the reason arrives.
  (void)Receive(socket, &theirs, sizeof(theirs), "", options.patience).ok();
}

}  // namespace hetccl::transport::rdma
