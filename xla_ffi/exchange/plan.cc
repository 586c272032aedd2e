#include "xla_ffi/exchange/plan.h"

#include <algorithm>
#include <utility>

namespace hetccl {
namespace {

std::vector<PlanMessage> GroupByPeer(const std::vector<PeerRange>& ranges) {
  std::vector<PlanMessage> messages;
  for (const PeerRange& range : ranges) {
    auto it = std::find_if(messages.begin(), messages.end(),
                           [&](const PlanMessage& m) { return m.peer == range.peer; });
    if (it == messages.end()) it = messages.insert(messages.end(), {range.peer, {}, 0});
    it->ranges.push_back(range);
    it->bytes += range.bytes;
  }
  return messages;
}

bool SameRange(const PeerRange& a, const PeerRange& b) {
  return a.peer == b.peer && a.buffer == b.buffer && a.offset == b.offset && a.bytes == b.bytes;
}

bool SameMessages(const std::vector<PlanMessage>& a, const std::vector<PlanMessage>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.peer == y.peer && std::equal(x.ranges.begin(), x.ranges.end(), y.ranges.begin(),
                                          y.ranges.end(), SameRange);
  });
}

template <typename Range>
bool Fits(const Range& range, const std::vector<BufferView>& buffers) {
  if (range.buffer >= buffers.size()) return false;
  const uint64_t size = buffers[range.buffer].bytes;
  return range.offset <= size && range.bytes <= size - range.offset;
}

}  // namespace

DevicePlan::DevicePlan(uint64_t id, std::string text, uint64_t wire_id, uint32_t rank,
                       const std::vector<PeerRange>& sends, const std::vector<PeerRange>& receives,
                       std::vector<ZeroRange> zeros)
    : id_(id),
      text_(std::move(text)),
      wire_id_(wire_id),
      rank_(rank),
      sends_(GroupByPeer(sends)),
      receives_(GroupByPeer(receives)),
      zeros_(std::move(zeros)) {}

bool DevicePlan::SameAs(const DevicePlan& other) const {
  return text_ == other.text_ && wire_id_ == other.wire_id_ && rank_ == other.rank_ &&
         SameMessages(sends_, other.sends_) && SameMessages(receives_, other.receives_) &&
         std::equal(zeros_.begin(), zeros_.end(), other.zeros_.begin(), other.zeros_.end(),
                    [](const ZeroRange& a, const ZeroRange& b) {
                      return a.buffer == b.buffer && a.offset == b.offset && a.bytes == b.bytes;
                    });
}

Status DevicePlan::Check(const std::vector<BufferView>& sends,
                         const std::vector<BufferView>& receives) const {
  bool fits = true;
  for (const PlanMessage& message : sends_) {
    for (const PeerRange& range : message.ranges) fits = fits && Fits(range, sends);
  }
  for (const PlanMessage& message : receives_) {
    for (const PeerRange& range : message.ranges) fits = fits && Fits(range, receives);
  }
  for (const ZeroRange& range : zeros_) fits = fits && Fits(range, receives);
  if (fits) return Status();
  return InternalError("the plan of " + text_ + " names bytes outside of the custom call's " +
                       std::to_string(sends.size()) + " send and " +
                       std::to_string(receives.size()) + " receive buffers");
}

}  // namespace hetccl
