// Copies on a device's copy streams.
#ifndef XLA_FFI_DEVICE_STREAM_STREAM_COPIER_H_
#define XLA_FFI_DEVICE_STREAM_STREAM_COPIER_H_

#include <array>
#include <cstdint>
#include <memory>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/device/space.h"
#include "xla_ffi/device/stream/stream_space.h"

namespace hetccl::device {

enum class SlotsOn { kHost, kDevice };

// A channel's copier: queues each submission and a mark behind it in a stream that it shares with
// other channels. Its destructor waits, bounded, for its copies.
class StreamCopier final : public Copier {
 public:
  static constexpr int kDepth = 8;

  StreamCopier(std::shared_ptr<StreamSpace> space, Direction direction, SlotsOn slots);
  ~StreamCopier() override;
  Status Initialise();

  int depth() const override { return kDepth; }
  Status Submit(const CopyPiece* pieces, size_t count, bool past_cache) override;
  Status Poll(uint64_t* ended) override;
  bool Quiet() override;

 private:
  Status Queue(const CopyPiece& piece, Stream stream) const;
  // Whether the device still answers, asked now and then while nothing ends.
  Status CheckDevice();

  const std::shared_ptr<StreamSpace> space_;
  const Direction direction_;
  const SlotsOn slots_;
  std::array<Mark*, kDepth> marks_{};  // of submission n % kDepth
  uint64_t submitted_ = 0;
  uint64_t ended_ = 0;
  TimePoint last_progress_{};
  Status lost_;
};

}  // namespace hetccl::device

#endif  // XLA_FFI_DEVICE_STREAM_STREAM_COPIER_H_
