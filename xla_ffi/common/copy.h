// Copying memory past the cache.
#ifndef XLA_FFI_COMMON_COPY_H_
#define XLA_FFI_COMMON_COPY_H_

#include <cstddef>

namespace hetccl {

// Like memcpy, with stores that do not bring the destination into the cache first. Faster where the
// destination is larger than the cache, slower where it is read again soon.
void CopyStreaming(void* destination, const void* source, size_t bytes);

}  // namespace hetccl

#endif  // XLA_FFI_COMMON_COPY_H_
