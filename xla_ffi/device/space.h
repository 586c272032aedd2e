// Where a rank's buffers lie, and how bytes get from there into slots of host memory and back.
//
// Channels and transports know slots and a copier; whether a copy is a memcpy, several threads, or
// a DMA engine's work on a stream is the space's business alone.
#ifndef XLA_FFI_DEVICE_SPACE_H_
#define XLA_FFI_DEVICE_SPACE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "xla_ffi/common/fd.h"
#include "xla_ffi/common/status.h"

namespace hetccl::device {

struct CopyPiece {
  std::byte* to;
  const std::byte* from;
  size_t bytes;
};

enum class Direction {
  kOut,  // a buffer of the space -> a slot
  kIn,   // a slot -> a buffer of the space
};

// Copies in the order of submission. Used by one thread at a time: a channel's proxy thread, or the
// closing thread after that. Never waits.
class Copier {
 public:
  virtual ~Copier() = default;

  // Submissions that are worth having under way at once; 1: each ends within Submit.
  virtual int depth() const = 0;
  // Begins one copy of several pieces. The memory stays the copier's until Poll counts it.
  // `past_cache`: the destination is larger than the cache and not read soon (a hint). After an
  // error nothing more can be submitted.
  virtual Status Submit(const CopyPiece* pieces, size_t count, bool past_cache) = 0;
  // How many submissions have ended since the copier was made. An error means that the device is
  // lost: nothing moves any more.
  virtual Status Poll(uint64_t* ended) = 0;
  // Whether nothing of this copier touches any memory now, also after errors.
  virtual bool Quiet() = 0;
};

// Memory that copiers of a space may use as slots. Released with this object, which keeps the
// space.
class SlotMemory {
 public:
  virtual ~SlotMemory() = default;
  virtual std::byte* data() const = 0;
};

// Device memory for a NIC: the memory begins `offset` bytes into what the descriptor stands for.
// Without a descriptor the driver does not export it, and `why_not` says why.
struct DmaBuf {
  UniqueFd descriptor;
  uint64_t offset = 0;
  std::string why_not;
};

// The point of a program from which on an exchange's buffers may be touched: on a stream, where all
// that was queued before the start has run. Thread-safe.
class Gate {
 public:
  virtual ~Gate() = default;
  // True from some moment on. Does not wait. An error means that the device is lost.
  virtual Status Poll(bool* open) = 0;
  // Whether Poll calls a driver, which may keep the caller while somebody else waits in it.
  virtual bool asks_driver() const { return false; }
};

// The queue of work that XLA hands to a handler: a stream of the device, null on the host.
using Queue = void*;

// What a space holds, for people: "streams", "pinned_bytes", ...
using SpaceStats = std::map<std::string, int64_t>;

// Thread-safe.
class Space {
 public:
  virtual ~Space() = default;

  // "cpu", "CUDA", "ROCM"
  virtual std::string platform() const = 0;
  virtual std::string name() const = 0;
  // Whether host code may read and write the buffers, so that sockets need no slots in between.
  virtual bool addressable() const = 0;

  // `slot_bytes`: the most that one submission will copy.
  virtual Status MakeCopier(Direction direction, size_t slot_bytes,
                            std::unique_ptr<Copier>* copier) = 0;
  // Makes memory of the caller usable for slots; it must outlive the object.
  virtual Status Register(void* data, size_t bytes, std::unique_ptr<SlotMemory>* memory) = 0;
  // Memory for slots.
  virtual Status Allocate(size_t bytes, std::unique_ptr<SlotMemory>* memory) = 0;

  // --- Slots in the device's own memory, for NICs that reach it. The host has none. ---
  virtual Status AllocateOnDevice(size_t, std::unique_ptr<SlotMemory>*, DmaBuf*) {
    return InternalError("the host is no device");
  }
  virtual Status MakeDeviceCopier(Direction, std::unique_ptr<Copier>*) {
    return InternalError("the host is no device");
  }
  // What a NIC has written to device memory can be seen by copies that are submitted after this.
  virtual Status OrderRemoteWrites() { return Status(); }

  // A buffer in which an exchange will receive.
  virtual void Expect(std::byte* data, size_t bytes) = 0;
  // Zeroes, in the queue's order.
  virtual Status Zero(std::byte* data, size_t bytes, Queue queue) = 0;
  // The gate of an exchange that starts here in the queue; null: it is open.
  virtual Status MarkStart(Queue queue, std::shared_ptr<Gate>* gate) = 0;

  virtual SpaceStats Stats() const = 0;
};

}  // namespace hetccl::device

#endif  // XLA_FFI_DEVICE_SPACE_H_
