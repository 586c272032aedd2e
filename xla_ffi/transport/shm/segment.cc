#include "xla_ffi/transport/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <new>

namespace hetccl::transport::shm {
namespace {

constexpr uint64_t kSegmentMagic = 0x31304D4853434348;  // "HCCSHM01"
constexpr size_t kControlBytes = 4096;
static_assert(sizeof(Control) <= kControlBytes);
// Touching memory that the other side has cut off would kill this process. Growing would take the
// memory's price from whoever is accounted for it. The last one keeps the set as it is.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr uint32_t kMinSlotBytes = 4096;
constexpr uint32_t kMaxSlotBytes = 64 << 20;
constexpr uint32_t kMaxSlots = 1024;

bool Sensible(uint64_t slot_bytes, uint64_t slots) {
  return slot_bytes >= kMinSlotBytes && slot_bytes <= kMaxSlotBytes && slot_bytes % 64 == 0 &&
         slots >= 2 && slots <= kMaxSlots;
}

Status Errno(const char* what) {
  return InternalError(ErrnoMessage(std::string("shared memory of a channel: ") + what, errno));
}

}  // namespace

Status Segment::Create(uint32_t slot_bytes, uint32_t slots, UniqueFd* out) {
  if (!Sensible(slot_bytes, slots)) {
    return InternalError(
        "a shared memory channel needs slots of 4 KB to 64 MB in multiples of 64 "
        "bytes, and 2 to 1024 of them");
  }
  UniqueFd fd(::memfd_create("hetccl", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return Errno("memfd_create");
  const size_t size = kControlBytes + static_cast<size_t>(slot_bytes) * slots;
  // Allocated now: writing to memory that the system cannot provide later would kill the process.
  if (const int error = ::posix_fallocate(fd.get(), 0, size); error != 0) {
    errno = error;
    return Errno("fallocate");
  }
  void* base = ::mmap(nullptr, kControlBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return Errno("mmap");
  auto* control = new (base) Control();
  control->magic = kSegmentMagic;
  control->slot_bytes = slot_bytes;
  control->slots = slots;
  ::munmap(base, kControlBytes);
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    return Errno("sealing");
  }
  *out = std::move(fd);
  return Status();
}

Segment::~Segment() {
  if (base_ != nullptr) ::munmap(base_, size_);
}

Status Segment::Map(const UniqueFd& memfd) {
  const int seals = ::fcntl(memfd.get(), F_GET_SEALS);
  struct stat info = {};
  if (seals < 0 || ::fstat(memfd.get(), &info) != 0) return Errno("it is not a memfd");
  if ((seals & kSeals) != kSeals) {
    return InternalError("shared memory of a channel: it is not sealed against resizing");
  }
  size_ = static_cast<size_t>(info.st_size);
  if (size_ < kControlBytes) return InternalError("shared memory of a channel: it is too small");
  // All pages at once: a fault per page would slow the first large message down.
  void* base =
      ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, memfd.get(), 0);
  if (base == MAP_FAILED) return Errno("mmap");
  base_ = base;
  slot_bytes_ = control().slot_bytes;
  slots_ = control().slots;
  if (control().magic != kSegmentMagic || !Sensible(slot_bytes_, slots_) ||
      size_ != kControlBytes + slot_bytes_ * slots_) {
    return InternalError(
        "shared memory of a channel: its layout is not ours; install the same jax_hetccl in every "
        "cluster");
  }
  return Status();
}

std::byte* Segment::slot(uint64_t number) const {
  return static_cast<std::byte*>(base_) + kControlBytes + (number % slots_) * slot_bytes_;
}

}  // namespace hetccl::transport::shm
