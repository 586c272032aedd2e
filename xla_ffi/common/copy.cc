#include "xla_ffi/common/copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hetccl {

#if defined(__x86_64__)
namespace {

constexpr size_t kLine = 64;

// SSE2 is part of x86-64; wider registers gain nothing, the memory bus is the limit.
void StreamLines(char* to, const char* from, size_t lines) {
  for (size_t i = 0; i < lines; ++i, to += kLine, from += kLine) {
    const auto* in = reinterpret_cast<const __m128i*>(from);
    auto* out = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  _mm_sfence();  // streaming stores are not ordered by the release store that follows
}

}  // namespace
#endif

void CopyStreaming(void* destination, const void* source, size_t bytes) {
#if defined(__x86_64__)
  auto* to = static_cast<char*>(destination);
  const auto* from = static_cast<const char*>(source);
  const size_t head = -reinterpret_cast<uintptr_t>(to) & (kLine - 1);
  if (bytes >= head + kLine) {
    std::memcpy(to, from, head);
    const size_t lines = (bytes - head) / kLine;
    StreamLines(to + head, from + head, lines);
    const size_t done = head + lines * kLine;
    std::memcpy(to + done, from + done, bytes - done);
    return;
  }
#endif
  std::memcpy(destination, source, bytes);
}

}  // namespace hetccl
