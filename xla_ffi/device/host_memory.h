// Hints to the kernel and to the C library about host memory.
#ifndef XLA_FFI_DEVICE_HOST_MEMORY_H_
#define XLA_FFI_DEVICE_HOST_MEMORY_H_

#include <cstddef>

namespace hetccl::device {

// Buffers from this size on are worth the hint: below, allocators reuse memory that is mapped.
inline constexpr size_t kHugePagesFrom = 4 << 20;

// Asks for huge pages in the part of the buffer that is not touched yet. A large buffer fresh from
// the system costs a page fault per 4 KB otherwise, several times the time of filling it. Does
// nothing where huge pages are not to be had; never changes the contents.
void PreferHugePages(void* data, size_t bytes);

// Asks the C library's allocator, for the whole process, to keep up to `bytes` of freed memory for
// the next step instead of returning it to the system after each one: a buffer of megabytes that is
// fresh from the system costs more than it takes to fill it. The counterpart for CPU devices of the
// pools that JAX keeps on GPUs. Serves buffers of any size in threads that begin to allocate later,
// and buffers below 64 MB in those that have allocated before. Returns false, and changes nothing,
// where the C library is another one than glibc.
bool KeepFreedMemory(size_t bytes);

}  // namespace hetccl::device

#endif  // XLA_FFI_DEVICE_HOST_MEMORY_H_
