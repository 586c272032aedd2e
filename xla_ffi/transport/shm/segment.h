// The memory that both processes of a channel share: a ring of slots and its counters.
#ifndef XLA_FFI_TRANSPORT_SHM_SEGMENT_H_
#define XLA_FFI_TRANSPORT_SHM_SEGMENT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "xla_ffi/common/fd.h"
#include "xla_ffi/common/status.h"

namespace hetccl::transport::shm {

// At the start of the segment. The counters only grow; slot n lives at index n % slots. Each has
// its own cache line, since each is written by one side and read by the other.
struct Control {
  uint64_t magic;
  uint32_t slot_bytes;
  uint32_t slots;
  alignas(64) std::atomic<uint64_t> published;  // slots that the sender has filled
  alignas(64) std::atomic<uint64_t> freed;      // slots that the receiver has emptied
  // Set by a side before it sleeps; the other side clears it and rings the doorbell.
  alignas(64) std::atomic<uint32_t> sender_sleeps;
  alignas(64) std::atomic<uint32_t> receiver_sleeps;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");
static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");

// A mapping of a segment, unmapped when destroyed. The memory is shared with a process that may be
// faulty: everything read from it is checked once and copied.
class Segment {
 public:
  static Status Create(uint32_t slot_bytes, uint32_t slots, UniqueFd* out);

  Segment() = default;
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  // Refuses memory that is not sealed against resizing or has no sensible layout.
  Status Map(const UniqueFd& memfd);

  std::byte* data() const { return static_cast<std::byte*>(base_); }
  size_t size() const { return size_; }
  Control& control() const { return *static_cast<Control*>(base_); }
  size_t slot_bytes() const { return slot_bytes_; }
  uint64_t slots() const { return slots_; }
  std::byte* slot(uint64_t number) const;

 private:
  void* base_ = nullptr;
  size_t size_ = 0;
  size_t slot_bytes_ = 0;
  uint64_t slots_ = 0;
};

}  // namespace hetccl::transport::shm

#endif  // XLA_FFI_TRANSPORT_SHM_SEGMENT_H_
