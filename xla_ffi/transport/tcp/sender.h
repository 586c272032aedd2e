#ifndef XLA_FFI_TRANSPORT_TCP_SENDER_H_
#define XLA_FFI_TRANSPORT_TCP_SENDER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "xla_ffi/transport/tcp/checksum.h"
#include "xla_ffi/transport/tcp/stream.h"
#include "xla_ffi/transport/transport.h"
#include "xla_ffi/transport/window.h"

namespace hetccl::transport::tcp {

// The sending half over one or more streams. Requires prepared sockets.
class TcpSender final : public Sender {
 public:
  // One window for each stream. `checksum`: see checksum.h; the same on both sides.
  TcpSender(std::vector<std::unique_ptr<Stream>> streams,
            std::vector<std::unique_ptr<SendWindow>> windows, bool checksum);

  PeerState peer() const override { return peer_; }
  std::string lost_reason() const override { return lost_reason_; }
  std::vector<int> poll_fds() const override;
  void OnReady() override {}  // every step looks
  bool ArmDoorbell() override { return false; }
  void SayGoodbye() override;
  bool Quiet() override;
  bool Drained() override;
  void Begin(const WireHeader& header, ConstPayload payload) override;
  Status Step(Progress* progress) override;
  bool peer_has_begun() const override;

 private:
  struct Lane {
    std::unique_ptr<Stream> stream;
    std::unique_ptr<SendWindow> payload;
    SendSums sums;

    bool finished() const { return payload->finished() && sums.finished(); }
  };

  // Sends on one lane until it is full, finished, or has had its share of this step.
  void StepLane(size_t lane, Progress* progress);
  // Reads what the receiver sends back: acknowledgements, its goodbye, the end of the stream.
  void ReadBackwards();
  void Lose(std::string reason);
  // Something on this lane did not come from the peer.
  void Distrust(size_t lane, const std::string& reason);

  std::vector<Lane> lanes_;
  const size_t header_bytes_;  // with its checksum
  CheckedHeader header_;
  size_t header_left_ = 0;
  bool busy_ = false;
  bool wants_acknowledgement_ = false;
  uint64_t large_begun_ = 0;  // messages begun here that will be acknowledged
  uint64_t acknowledged_ = 0;
  PeerState peer_ = PeerState::kAlive;
  std::string lost_reason_;
  Status forged_;
};

}  // namespace hetccl::transport::tcp

#endif  // XLA_FFI_TRANSPORT_TCP_SENDER_H_
