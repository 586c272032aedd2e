// The sending side of a channel.
#ifndef XLA_FFI_EXCHANGE_OUTGOING_H_
#define XLA_FFI_EXCHANGE_OUTGOING_H_

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "xla_ffi/exchange/channel.h"

namespace hetccl {

// Sends the posted messages in their order. See Channel for threads and completion.
class OutgoingChannel final : public Channel {
 public:
  OutgoingChannel(std::shared_ptr<ChannelContext> context, uint32_t local_rank, uint32_t peer_rank,
                  std::unique_ptr<transport::Sender> sender);

  // Queues one part of `exchange` (AddPart was called for it); its end calls PartEnded. The
  // payload's memory must stay valid until then. Any thread.
  void Post(std::shared_ptr<Exchange> exchange, transport::ConstPayload payload);

  proxy::Pace Step() override;
  std::vector<int> poll_fds() const override { return sender_->poll_fds(); }
  void OnReady() override { sender_->OnReady(); }
  bool ArmDoorbell() override { return sender_->ArmDoorbell(); }
  void CheckDeadlines(TimePoint now) override;
  void FailAll() override;
  void Describe(std::vector<PendingPart>* parts) const override;
  std::string OldestOperation() const override;
  transport::Route route() const override;
  void Shutdown() override;
  bool Drained() override { return sender_->Drained(); }
  void Release() override;

 private:
  struct Part {
    std::shared_ptr<Exchange> exchange;
    transport::WireHeader header;
    transport::ConstPayload payload;
    TimePoint posted;
  };

  // Makes the next queued part the current one, once its device has come to its start.
  enum class Next { kNone, kTaken, kNotStarted };
  Next TakeNext();
  void EndCurrent(bool failed);
  // The failure of the part under way if it has passed its bound; ok otherwise. Requires mutex_ and
  // such a part.
  Status Overdue(TimePoint now) const;

  std::unique_ptr<transport::Sender> sender_;  // null after Release, which holds mutex_
  std::atomic<bool> begun_{false};             // the peer has begun to take the current message
  // Guarded by mutex_. current_ is written by the proxy thread only, which may read it without.
  std::deque<Part> queue_;
  std::optional<Part> current_;
  TimePoint idle_since_{};  // when the last part ended
};

}  // namespace hetccl

#endif  // XLA_FFI_EXCHANGE_OUTGOING_H_
