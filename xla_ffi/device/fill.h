// Filling host memory with a repeated pattern.
#ifndef XLA_FFI_DEVICE_FILL_H_
#define XLA_FFI_DEVICE_FILL_H_

#include <cstddef>

namespace hetccl::device {

// Fills `bytes` bytes with repetitions of the pattern; the last repetition may be cut.
void FillPattern(void* data, size_t bytes, const void* pattern, size_t pattern_bytes);

}  // namespace hetccl::device

#endif  // XLA_FFI_DEVICE_FILL_H_
