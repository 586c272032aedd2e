// The receiving side of a channel.
#ifndef XLA_FFI_EXCHANGE_INCOMING_H_
#define XLA_FFI_EXCHANGE_INCOMING_H_

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "xla_ffi/exchange/channel.h"
#include "xla_ffi/exchange/matching.h"

namespace hetccl {

// Matches the messages that arrive with the receives that were posted; a message waits at the head
// of the channel until its receive is posted. Receives may be posted before the peer has connected.
// See Channel for threads and completion.
//
// A message of a program of which no receive is posted may just be early: the program may still
// start here. It counts as a mismatch while receives of other programs are posted and either
// - nothing has moved to or from this peer, on any channel, for `mismatch_grace`: then both sides
//   most likely wait for each other, or
// - the oldest receive has reached its arrival bound.
// Programs of one thread of each process start in the same order everywhere. Those of several
// threads can get there without a mistake, if one starts later here than the grace: hence the
// advice in the error.
//
// The arrival bound of a receive begins when it is posted or when the receive before it has ended,
// whichever is later. Messages of other programs that overtake it do not put it off.
class IncomingChannel final : public Channel {
 public:
  using Channel::Channel;

  // Connects the channel; call once, before it is added to a proxy.
  void Attach(std::unique_ptr<transport::Receiver> receiver);
  bool attached() const;

  // Posts one part of `exchange` (AddPart was called for it); its end calls PartEnded. The memory
  // must stay valid until then. Any thread.
  void Post(std::shared_ptr<Exchange> exchange, transport::MutablePayload payload);

  proxy::Pace Step() override;
  std::vector<int> poll_fds() const override { return receiver_->poll_fds(); }
  void OnReady() override { receiver_->OnReady(); }
  bool ArmDoorbell() override { return receiver_->ArmDoorbell(); }
  void CheckDeadlines(TimePoint now) override;
  void FailAll() override;
  void Describe(std::vector<PendingPart>* parts) const override;
  std::string OldestOperation() const override;
  transport::Route route() const override;
  void Shutdown() override;
  bool Drained() override { return receiver_ == nullptr || receiver_->Drained(); }
  void Release() override;

 private:
  struct Part {
    std::shared_ptr<Exchange> exchange;
    uint64_t occurrence;
    uint64_t bytes;
    transport::MutablePayload payload;
    TimePoint since;  // posted, or later if its turn came later
  };
  // A message that arrived and matches no posted receive so far.
  struct Stranger {
    transport::WireHeader header;
    TimePoint since;
  };

  Expected ExpectedOf(const Part& part) const;
  // Looks for the receive that the head belongs to and makes it current, once its device has come
  // to its start.
  enum class Found { kNothing, kCurrent, kNotStarted, kBroken };
  Found MatchHead(const transport::WireHeader& head);
  // Begins to receive the part at this place; false if the channel has failed meanwhile.
  bool MakeCurrent(size_t place);
  proxy::Pace StepCurrent();
  void EndCurrent(bool failed);
  // What this side should say when the head and the oldest receive disagree. Requires mutex_.
  Status Mismatch(const transport::WireHeader& head, const Part& part,
                  std::optional<Duration> waited = std::nullopt) const;
  // The failure of the part under way, or of the oldest receive, that has passed its bound; ok if
  // there is none. Requires mutex_.
  Status OverdueCurrent(TimePoint now) const;
  Status OverdueOldest(TimePoint now) const;
  // Asks the oldest receive's exchange whether it has started, while nothing arrives, unless that
  // might wait. Watchdog.
  void PollOldest();

  std::unique_ptr<transport::Receiver>
      receiver_;  // set by Attach, then proxy thread only, until Release
  // Guarded by mutex_. current_ is written by the proxy thread only, which may read it without.
  bool attached_ = false;
  std::deque<Part> posted_;
  std::optional<Part> current_;
  bool overtaking_ = false;  // current_ was taken from behind the oldest receive
  std::optional<Stranger> stranger_;
};

}  // namespace hetccl

#endif  // XLA_FFI_EXCHANGE_INCOMING_H_
