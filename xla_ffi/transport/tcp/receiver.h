#ifndef XLA_FFI_TRANSPORT_TCP_RECEIVER_H_
#define XLA_FFI_TRANSPORT_TCP_RECEIVER_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "xla_ffi/transport/tcp/checksum.h"
#include "xla_ffi/transport/tcp/stream.h"
#include "xla_ffi/transport/transport.h"
#include "xla_ffi/transport/window.h"

namespace hetccl::transport::tcp {

// The receiving half over one or more streams. Requires prepared sockets.
class TcpReceiver final : public Receiver {
 public:
  // One window for each stream. `checksum`: see checksum.h; the same on both sides.
  TcpReceiver(std::vector<std::unique_ptr<Stream>> streams,
              std::vector<std::unique_ptr<ReceiveWindow>> windows, bool checksum);

  PeerState peer() const override { return peer_; }
  std::string lost_reason() const override { return lost_reason_; }
  std::vector<int> poll_fds() const override;
  void OnReady() override {}  // every step looks
  bool ArmDoorbell() override { return false; }
  void SayGoodbye() override;
  bool Quiet() override;
  bool Drained() override;
  Status Peek(const WireHeader** header) override;
  void Accept(MutablePayload payload) override;
  Status Step(Progress* progress) override;

 private:
  struct Lane {
    std::unique_ptr<Stream> stream;
    std::unique_ptr<ReceiveWindow> payload;
    ReceiveSums sums;

    bool finished() const { return payload->finished() && sums.finished(); }
  };

  // Reads headers together with what follows them: a small message then costs one system call.
  Status FillStaging();
  // Hands staged bytes to the first lane's payload.
  Status DrainStaging(Progress* progress);
  Status StepLane(size_t lane, Progress* progress);
  // Describes where at most `limit` next payload bytes of a lane go, and its checksum if that is
  // next.
  static int Targets(Lane* lane, size_t limit, iovec* pieces, int capacity);
  // Takes note of bytes that were put there.
  Status Take(size_t lane, const iovec* pieces, size_t bytes, Progress* progress);
  // Says which link it was that changed something.
  Status Named(size_t lane, const Status& status) const;
  // What follows from having received nothing on a lane.
  Status Nothing(size_t lane, const Moved& moved);
  void Lose(std::string reason);

  std::vector<Lane> lanes_;
  std::vector<std::byte> staging_;
  size_t staged_begin_ = 0;
  size_t staged_end_ = 0;
  const size_t header_bytes_;  // with its checksum
  CheckedHeader header_;
  bool have_header_ = false;
  PeerState peer_ = PeerState::kAlive;
  std::string lost_reason_;
};

}  // namespace hetccl::transport::tcp

#endif  // XLA_FFI_TRANSPORT_TCP_RECEIVER_H_
