// The test twin's memory: what is device memory, what is registered, and under which addresses.
#ifndef XLA_FFI_DEVICE_TWIN_MEMORY_H_
#define XLA_FFI_DEVICE_TWIN_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

namespace hetccl::twin {

enum class Kind { kDevice, kHostAllocated, kHostRegistered, kSignal };

struct Range {
  Kind kind = Kind::kDevice;
  int device = 0;
  size_t bytes = 0;
  char* base = nullptr;       // where the host reads and writes it
  uintptr_t device_base = 0;  // what the driver hands out as its device address
  int descriptor = -1;        // device memory: the memfd behind it
  bool contains(uintptr_t start, uintptr_t address, size_t size) const {
    return address >= start && address - start <= bytes && size <= bytes - (address - start);
  }
};

// Thread-safe. "Device memory" is ordinary memory of the process that the twin keeps apart; each
// allocation is a memfd, so that it can be exported as a dma-buf is.
class Memory {
 public:
  Memory() = default;
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Codes of codes.h.
  int Allocate(int device, Kind kind, size_t bytes, void** address);
  int Free(uintptr_t address, bool host_memory);
  // A new descriptor of the first bytes of device memory; negative: there is none. A real dma-buf
  // where the kernel makes one of a memfd, else the memfd.
  static int Export(const Range& range, size_t bytes);
  // `alias`: the device sees it elsewhere, so that a mixed-up address is an error and not luck.
  int Register(void* base, size_t bytes, bool alias);
  int Unregister(void* base);

  // The range that an address of either side lies in.
  std::optional<Range> Find(uintptr_t address) const;
  // Where [address, address + bytes) can be read, if all of it is known. `host_side`: host
  // addresses are taken too, as copies do; else only device addresses.
  char* Translate(uintptr_t address, size_t bytes, bool host_side) const;
  // Whether a byte of host memory in the range is registered or the driver's own.
  bool Touches(uintptr_t address, size_t bytes) const;

  size_t bytes(Kind kind) const;
  void Clear();

 private:
  bool Overlaps(uintptr_t address, size_t bytes) const;  // with mutex_ held
  void Release(const Range& range);

  mutable std::mutex mutex_;
  std::map<uintptr_t, Range> ranges_;  // by host address; guarded by mutex_
};

}  // namespace hetccl::twin

#endif  // XLA_FFI_DEVICE_TWIN_MEMORY_H_
