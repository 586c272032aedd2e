// Copying memory, through the cache or past it.
#ifndef XLA_FFI_COMMON_COPY_H_
#define XLA_FFI_COMMON_COPY_H_

#include <cstddef>
#include <cstring>

namespace hetccl {

// Like memcpy, with stores that do not bring the destination into the cache first. Faster where the
// destination is larger than the cache, slower where it is read again soon.
void CopyStreaming(void* destination, const void* source, size_t bytes);

// The one or the other.
inline void Copy(void* destination, const void* source, size_t bytes, bool past_cache) {
  if (past_cache) {
    CopyStreaming(destination, source, bytes);
  } else {
    std::memcpy(destination, source, bytes);
  }
}

}  // namespace hetccl

#endif  // XLA_FFI_COMMON_COPY_H_
