// What one exchange sends and receives on one device.
#ifndef XLA_FFI_EXCHANGE_PLAN_H_
#define XLA_FFI_EXCHANGE_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "xla_ffi/common/status.h"

namespace hetccl {

// A byte range of one of a custom call's buffers that goes to or comes from a peer.
struct PeerRange {
  uint32_t peer;
  uint32_t buffer;
  uint64_t offset;
  uint64_t bytes;
};

// A byte range of a receive buffer that nobody sends: it is set to zero.
struct ZeroRange {
  uint32_t buffer;
  uint64_t offset;
  uint64_t bytes;
};

// A buffer that XLA handed to a handler. Its memory is XLA's.
struct BufferView {
  std::byte* data;
  uint64_t bytes;
};

// All ranges with one peer, in the order in which they travel: one message.
struct PlanMessage {
  uint32_t peer;
  std::vector<PeerRange> ranges;
  uint64_t bytes;
};

// Immutable once made; shared by all its exchanges.
class DevicePlan {
 public:
  DevicePlan(uint64_t id, std::string text, uint64_t wire_id, uint32_t rank,
             const std::vector<PeerRange>& sends, const std::vector<PeerRange>& receives,
             std::vector<ZeroRange> zeros);

  uint64_t id() const { return id_; }
  uint64_t wire_id() const { return wire_id_; }
  // The rank of the device that this plan is for.
  uint32_t rank() const { return rank_; }
  // For people, e.g. "psum/data f32[1024]".
  const std::string& text() const { return text_; }
  const std::vector<PlanMessage>& sends() const { return sends_; }
  const std::vector<PlanMessage>& receives() const { return receives_; }
  const std::vector<ZeroRange>& zeros() const { return zeros_; }

  // Whether two plans would do the same.
  bool SameAs(const DevicePlan& other) const;
  // Checks that every range lies within its buffer.
  Status Check(const std::vector<BufferView>& sends, const std::vector<BufferView>& receives) const;

 private:
  const uint64_t id_;
  const std::string text_;
  const uint64_t wire_id_;
  const uint32_t rank_;
  std::vector<PlanMessage> sends_;
  std::vector<PlanMessage> receives_;
  std::vector<ZeroRange> zeros_;
};

}  // namespace hetccl

#endif  // XLA_FFI_EXCHANGE_PLAN_H_
