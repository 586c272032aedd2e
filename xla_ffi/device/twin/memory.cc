#include "xla_ffi/device/twin/memory.h"

#include <fcntl.h>
#include <linux/udmabuf.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "xla_ffi/device/twin/codes.h"

namespace hetccl::twin {
namespace {

// Not an address that a process can have, so nobody but Translate can use it.
constexpr uintptr_t kAlias = uintptr_t{1} << 60;

size_t Pages(size_t bytes) {
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

}  // namespace

Memory::~Memory() { Clear(); }

int Memory::Allocate(int device, Kind kind, size_t bytes, void** address) {
  if (address == nullptr || bytes == 0) return kInvalidValue;
  const int descriptor = ::memfd_create("twin-memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) return kOutOfMemory;
  void* base = MAP_FAILED;
  if (::ftruncate(descriptor, static_cast<off_t>(Pages(bytes))) == 0 &&
      ::fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK) == 0) {
    base = ::mmap(nullptr, Pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  }
  if (base == MAP_FAILED) {
    ::close(descriptor);
    return kOutOfMemory;
  }
  Range range;
  range.kind = kind;
  range.device = device;
  range.bytes = bytes;
  range.base = static_cast<char*>(base);
  range.device_base = reinterpret_cast<uintptr_t>(base);
  range.descriptor = descriptor;
  std::lock_guard<std::mutex> lock(mutex_);
  ranges_[range.device_base] = range;
  *address = base;
  return kSuccess;
}

int Memory::Export(const Range& range, size_t bytes) {
  const int maker = ::open("/dev/udmabuf", O_RDWR | O_CLOEXEC);
  if (maker >= 0) {
    udmabuf_create create = {};
    create.memfd = static_cast<uint32_t>(range.descriptor);
    create.flags = UDMABUF_FLAGS_CLOEXEC;
    create.size = bytes;
    const int dmabuf = ::ioctl(maker, UDMABUF_CREATE, &create);
    ::close(maker);
    if (dmabuf >= 0) return dmabuf;
  }
  return ::fcntl(range.descriptor, F_DUPFD_CLOEXEC, 0);
}

int Memory::Free(uintptr_t address, bool host_memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = ranges_.find(address);
  if (found == ranges_.end() || found->second.kind == Kind::kHostRegistered ||
      (found->second.kind == Kind::kHostAllocated) != host_memory) {
    return kInvalidValue;
  }
  Release(found->second);
  ranges_.erase(found);
  return kSuccess;
}

int Memory::Register(void* base, size_t bytes, bool alias) {
  const auto address = reinterpret_cast<uintptr_t>(base);
  if (base == nullptr || bytes == 0) return kInvalidValue;
  Range range;
  range.kind = Kind::kHostRegistered;
  range.bytes = bytes;
  range.base = static_cast<char*>(base);
  range.device_base = alias ? address | kAlias : address;
  std::lock_guard<std::mutex> lock(mutex_);
  if (Overlaps(address, bytes)) return kHostMemoryAlreadyRegistered;
  ranges_[address] = range;
  return kSuccess;
}

int Memory::Unregister(void* base) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = ranges_.find(reinterpret_cast<uintptr_t>(base));
  if (found == ranges_.end() || found->second.kind != Kind::kHostRegistered) {
    return kHostMemoryNotRegistered;
  }
  ranges_.erase(found);
  return kSuccess;
}

std::optional<Range> Memory::Find(uintptr_t address) const {
  const uintptr_t host = address & ~kAlias;
  std::lock_guard<std::mutex> lock(mutex_);
  auto after = ranges_.upper_bound(host);
  if (after == ranges_.begin()) return std::nullopt;
  const Range& range = std::prev(after)->second;
  const auto base = reinterpret_cast<uintptr_t>(range.base);
  const bool found =
      range.contains(base, address, 1) || range.contains(range.device_base, address, 1);
  return found ? std::optional<Range>(range) : std::nullopt;
}

char* Memory::Translate(uintptr_t address, size_t bytes, bool host_side) const {
  const std::optional<Range> range = Find(address);
  if (!range) return nullptr;
  if (range->contains(range->device_base, address, bytes)) {
    return range->base + (address - range->device_base);
  }
  const auto base = reinterpret_cast<uintptr_t>(range->base);
  if (host_side && range->contains(base, address, bytes)) return range->base + (address - base);
  return nullptr;
}

bool Memory::Touches(uintptr_t address, size_t bytes) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return Overlaps(address, bytes);
}

bool Memory::Overlaps(uintptr_t address, size_t bytes) const {
  const auto after = ranges_.lower_bound(address + bytes);
  if (after == ranges_.begin()) return false;
  const auto& [start, range] = *std::prev(after);
  return start + range.bytes > address;
}

size_t Memory::bytes(Kind kind) const {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t sum = 0;
  for (const auto& [start, range] : ranges_) sum += range.kind == kind ? range.bytes : 0;
  return sum;
}

void Memory::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [start, range] : ranges_) Release(range);
  ranges_.clear();
}

void Memory::Release(const Range& range) {
  if (range.descriptor < 0) return;
  ::munmap(range.base, Pages(range.bytes));
  ::close(range.descriptor);
}

}  // namespace hetccl::twin
