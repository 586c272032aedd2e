#include "xla_ffi/device/host_memory.h"

#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <climits>
#include <cstdint>

namespace hetccl::device {

void PreferHugePages(void* data, size_t bytes) {
  if (bytes < kHugePagesFrom) return;
  constexpr uintptr_t kHugePage = 2 << 20;
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (address + bytes) & ~(kHugePage - 1);
  if (begin < end) (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

bool KeepFreedMemory(size_t bytes) {
#if defined(__GLIBC__)
  // The arenas of threads grow by heaps of at most this size. Larger buffers are always mapped anew
  // there, so all threads are to share the main arena, which knows no such limit; those that have
  // taken another one keep it. With less room to spare than a heap an arena gives its last one back
  // whenever that is empty, which for buffers of megabytes is in every step.
  constexpr int kHeap = 64 << 20;
  const int keep = static_cast<int>(std::min<size_t>(bytes, INT_MAX));
  return ::mallopt(M_ARENA_MAX, 1) == 1 && ::mallopt(M_MMAP_THRESHOLD, keep) == 1 &&
         ::mallopt(M_TRIM_THRESHOLD, keep) == 1 && ::mallopt(M_TOP_PAD, std::min(keep, kHeap)) == 1;
#else
  (void)bytes;
  return false;
#endif
}

}  // namespace hetccl::device
