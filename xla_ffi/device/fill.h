// Filling memory with a repeated pattern.
#ifndef XLA_FFI_DEVICE_FILL_H_
#define XLA_FFI_DEVICE_FILL_H_

#include <cstddef>

namespace hetccl::device {

// One element's little-endian bytes; size 0, 1, 2, 4 or 8. Size 0 stands for zeros.
struct Pattern {
  unsigned char bytes[8];
  size_t size;
};

// Fills `bytes` bytes of host memory with repetitions of the pattern; the last repetition may be
// cut.
void FillPattern(void* data, size_t bytes, const void* pattern, size_t pattern_bytes);

}  // namespace hetccl::device

#endif  // XLA_FFI_DEVICE_FILL_H_
