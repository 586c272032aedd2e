// Filling memory of a device.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>

#include "xla_ffi/device/stream/stream_space.h"

namespace hetccl::device {

Status StreamSpace::FillOn(const FillRange& range, Stream stream) const {
  if (range.bytes == 0) return Status();
  const Pattern& pattern = range.pattern;
  if (pattern.size <= 1) {
    return gpu_.MemsetD8Async(range.data, pattern.size == 0 ? 0 : pattern.bytes[0], range.bytes,
                              stream);
  }
  // A word: of 8 bytes the upper half, which makes a NaN of both halves; of 2 bytes both.
  uint32_t word = 0;
  std::memcpy(&word, pattern.bytes + (pattern.size == 8 ? 4 : 0),
              std::min<size_t>(pattern.size, 4));
  if (pattern.size == 2) word |= word << 16;
  const size_t words = range.bytes / sizeof(word);
  if (words > 0) {
    Status status = gpu_.MemsetD32Async(range.data, word, words, stream);
    if (!status.ok()) return status;
  }
  for (size_t i = words * sizeof(word); i < range.bytes; ++i) {
    Status status = gpu_.MemsetD8Async(range.data + i, pattern.bytes[i % 2], 1, stream);
    if (!status.ok()) return status;
  }
  return Status();
}

Status StreamSpace::Fill(const std::vector<FillRange>& ranges, Queue queue) {
  const ScopedCurrent current(gpu_);
  if (!current.status().ok()) return current.status();
  for (const FillRange& range : ranges) {
    if (Status status = FillOn(range, static_cast<Stream>(queue)); !status.ok()) return status;
  }
  return Status();
}

Status StreamSpace::FillNow(const std::vector<FillRange>& ranges, Duration bound) {
  if (Status status = Enter(); !status.ok()) return status;
  const std::shared_lock<std::shared_mutex> lock(copy_streams_mutex_);
  const Stream stream = copy_stream(Direction::kIn);
  for (const FillRange& range : ranges) {
    if (Status status = FillOn(range, stream); !status.ok()) return status;
  }
  bool done = false;
  Status status = Passes(stream, bound, &done);
  if (!status.ok() || done) return status;
  return Status(ErrorKind::kTimeout, "a fill on " + gpu_.name() + " does not end");
}

}  // namespace hetccl::device
