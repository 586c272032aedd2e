#include "xla_ffi/device/fill.h"

#include <algorithm>
#include <cstring>

namespace hetccl::device {

void FillPattern(void* data, size_t bytes, const void* pattern, size_t pattern_bytes) {
  char* out = static_cast<char*>(data);
  size_t filled = std::min(bytes, pattern_bytes);
  std::memcpy(out, pattern, filled);
  // Doubles what is there; the steps stay within the cache so that the source is always hot.
  constexpr size_t kMaxStep = 1 << 16;
  while (filled < bytes) {
    const size_t whole = filled / pattern_bytes * pattern_bytes;
    const size_t step = std::min({whole, bytes - filled, kMaxStep / pattern_bytes * pattern_bytes});
    std::memcpy(out + filled, out, step);
    filled += step;
  }
}

}  // namespace hetccl::device
