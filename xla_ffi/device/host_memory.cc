#include "xla_ffi/device/host_memory.h"

#include <sys/mman.h>

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

}  // namespace hetccl::device
