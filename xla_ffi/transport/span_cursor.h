// A position in a payload that consists of several spans.
#ifndef XLA_FFI_TRANSPORT_SPAN_CURSOR_H_
#define XLA_FFI_TRANSPORT_SPAN_CURSOR_H_

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "xla_ffi/transport/message.h"

namespace hetccl::transport {

// Walks over the spans of a payload. Not thread-safe; does not own the memory.
template <typename SpanType>
class SpanCursor {
 public:
  SpanCursor() = default;
  explicit SpanCursor(std::vector<SpanType> spans) : spans_(std::move(spans)) {
    for (const SpanType& span : spans_) remaining_ += span.size;
    SkipFinished();
  }

  size_t remaining() const { return remaining_; }

  // The contiguous memory at this position. Requires remaining() > 0.
  SpanType Front() const { return {spans_[index_].data + offset_, spans_[index_].size - offset_}; }

  // Requires bytes <= remaining().
  void Advance(size_t bytes) {
    remaining_ -= bytes;
    while (bytes > 0) {
      const size_t step = std::min(bytes, spans_[index_].size - offset_);
      offset_ += step;
      bytes -= step;
      SkipFinished();
    }
  }

  // Walks over the next bytes, at most `limit`: visit(span, offset) for each contiguous part, with
  // its offset from here. Returns how many bytes that were.
  template <typename Visit>
  size_t Take(size_t limit, Visit&& visit) {
    const size_t total = std::min(limit, remaining_);
    for (size_t offset = 0; offset < total;) {
      SpanType part = Front();
      part.size = std::min(part.size, total - offset);
      visit(part, offset);
      Advance(part.size);
      offset += part.size;
    }
    return total;
  }

  // Describes up to `limit` bytes from here in at most `capacity` entries; returns how many
  // entries were filled. Does not advance.
  int Gather(size_t limit, iovec* out, int capacity) const {
    int count = 0;
    size_t offset = offset_;
    for (size_t i = index_; i < spans_.size() && count < capacity && limit > 0; ++i, offset = 0) {
      const size_t size = std::min(limit, spans_[i].size - offset);
      if (size == 0) continue;
      // iovec is not const-correct; senders only read through it.
      out[count].iov_base = const_cast<std::byte*>(spans_[i].data + offset);
      out[count].iov_len = size;
      ++count;
      limit -= size;
    }
    return count;
  }

 private:
  void SkipFinished() {
    while (index_ < spans_.size() && offset_ == spans_[index_].size) {
      ++index_;
      offset_ = 0;
    }
  }

  std::vector<SpanType> spans_;
  size_t index_ = 0;
  size_t offset_ = 0;
  size_t remaining_ = 0;
};

// The part [begin, end) of a payload. Requires begin <= end <= the payload's size.
template <typename SpanType>
std::vector<SpanType> Slice(const std::vector<SpanType>& payload, size_t begin, size_t end) {
  std::vector<SpanType> part;
  size_t position = 0;
  for (const SpanType& span : payload) {
    const size_t from = std::max(begin, position);
    const size_t to = std::min(end, position + span.size);
    if (from < to) part.push_back({span.data + (from - position), to - from});
    position += span.size;
  }
  return part;
}

// Bytes in all spans.
template <typename SpanType>
size_t TotalSize(const std::vector<SpanType>& payload) {
  size_t size = 0;
  for (const SpanType& span : payload) size += span.size;
  return size;
}

}  // namespace hetccl::transport

#endif  // XLA_FFI_TRANSPORT_SPAN_CURSOR_H_
