#include "xla_ffi/transport/testing/loopback.h"

#include <algorithm>
#include <utility>

#include "xla_ffi/transport/span_cursor.h"
#include "xla_ffi/transport/testing/pipe.h"

namespace hetccl::transport::testing {
namespace {

class LoopbackSender final : public Sender {
 public:
  LoopbackSender(std::shared_ptr<Pipe> pipe, uint64_t corrupt_header_of)
      : pipe_(std::move(pipe)), corrupt_header_of_(corrupt_header_of) {}
  ~LoopbackSender() override { pipe_->Close(Side::kSender); }

  PeerState peer() const override { return pipe_->PeerOf(Side::kSender); }
  std::string lost_reason() const override { return "the test's pipe broke"; }
  std::vector<int> poll_fds() const override { return {pipe_->fd(Side::kSender)}; }
  void OnReady() override {}
  // Delays end by time alone, so there is nothing to be woken by.
  bool ArmDoorbell() override { return true; }
  bool Drained() override { return true; }
  void SayGoodbye() override {
    if (!busy_) pipe_->SayGoodbye(Side::kSender);
  }

  void Begin(const WireHeader& header, ConstPayload payload) override {
    header_ = header;
    if (begun_++ == corrupt_header_of_) header_.magic ^= 1;
    ConstPayload all = {{reinterpret_cast<const std::byte*>(&header_), sizeof(header_)}};
    all.insert(all.end(), payload.begin(), payload.end());
    message_ = SpanCursor<ConstSpan>(std::move(all));
    total_ = message_.remaining();
    busy_ = true;
  }

  Status Step(Progress* progress) override {
    *progress = {};
    if (!busy_) return Status();
    const size_t before = PayloadMoved();
    while (message_.remaining() > 0) {
      const ConstSpan front = message_.Front();
      const size_t count = pipe_->Write(front.data, front.size);
      message_.Advance(count);
      if (count < front.size) break;
    }
    progress->bytes = PayloadMoved() - before;
    progress->done = message_.remaining() == 0;
    busy_ = !progress->done;
    return Status();
  }

  bool peer_has_begun() const override { return pipe_->accepted() >= begun_; }

 private:
  size_t PayloadMoved() const {
    const size_t moved = total_ - message_.remaining();
    return moved - std::min(moved, sizeof(header_));
  }

  const std::shared_ptr<Pipe> pipe_;
  const uint64_t corrupt_header_of_;
  uint64_t begun_ = 0;
  WireHeader header_;
  SpanCursor<ConstSpan> message_;
  size_t total_ = 0;
  bool busy_ = false;
};

class LoopbackReceiver final : public Receiver {
 public:
  explicit LoopbackReceiver(std::shared_ptr<Pipe> pipe) : pipe_(std::move(pipe)) {}
  ~LoopbackReceiver() override { pipe_->Close(Side::kReceiver); }

  PeerState peer() const override { return pipe_->PeerOf(Side::kReceiver); }
  std::string lost_reason() const override { return "the test's pipe broke"; }
  std::vector<int> poll_fds() const override { return {pipe_->fd(Side::kReceiver)}; }
  void OnReady() override {}
  bool ArmDoorbell() override { return true; }
  bool Drained() override { return true; }
  void SayGoodbye() override { pipe_->SayGoodbye(Side::kReceiver); }

  Status Peek(const WireHeader** header) override {
    *header = nullptr;
    auto* bytes = reinterpret_cast<std::byte*>(&header_);
    if (have_ < sizeof(header_)) {
      have_ += pipe_->Read(bytes + have_, sizeof(header_) - have_);
      if (have_ < sizeof(header_)) return Status();
      if (Status status = CheckHeader(header_); !status.ok()) return status;
    }
    *header = &header_;
    return Status();
  }

  void Accept(MutablePayload payload) override {
    payload_ = SpanCursor<MutableSpan>(std::move(payload));
    pipe_->CountAccepted();
  }

  Status Step(Progress* progress) override {
    *progress = {};
    while (payload_.remaining() > 0) {
      const MutableSpan front = payload_.Front();
      const size_t count = pipe_->Read(front.data, front.size);
      payload_.Advance(count);
      progress->bytes += count;
      if (count < front.size) break;
    }
    progress->done = payload_.remaining() == 0;
    if (progress->done) have_ = 0;
    return Status();
  }

 private:
  const std::shared_ptr<Pipe> pipe_;
  WireHeader header_;
  size_t have_ = 0;
  SpanCursor<MutableSpan> payload_;
};

}  // namespace

Pair MakeFaulty(const Faults& faults, size_t capacity) {
  auto pipe = std::make_shared<Pipe>(capacity, faults);
  return {std::make_unique<LoopbackSender>(pipe, faults.corrupt_header_of),
          std::make_unique<LoopbackReceiver>(pipe)};
}

Pair MakeLoopback(size_t capacity) { return MakeFaulty(Faults{}, capacity); }

}  // namespace hetccl::transport::testing
