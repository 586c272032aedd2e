// Where the bytes of a message come from that the NIC sends.
#ifndef XLA_FFI_TRANSPORT_RDMA_SOURCE_H_
#define XLA_FFI_TRANSPORT_RDMA_SOURCE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "xla_ffi/device/space.h"
#include "xla_ffi/transport/rdma/device.h"
#include "xla_ffi/transport/rdma/registered_spans.h"
#include "xla_ffi/transport/span_cursor.h"
#include "xla_ffi/transport/staged_window.h"

namespace hetccl::transport::rdma {

// Registered memory that may be written from.
struct Piece {
  const std::byte* data = nullptr;
  size_t bytes = 0;  // 0: there is none yet
  uint32_t lkey = 0;
  bool staged = false;  // a copy: the payload's memory is free already
  bool ends_slot = false;
};

// The user's memory itself where that can be registered and is worth it, else slots into which the
// space's copier copies; a message whose memory turns out not to be registrable goes on in slots.
// Used by one thread at a time, except copied().
class Source {
 public:
  // `paging`: abi::kAccessOnDemand if that is to be used for the user's memory, else 0.
  Status Make(std::shared_ptr<Device> device, int paging, device::Space& space,
              const Staging& staging);

  void Begin(ConstPayload payload);
  // Begins what copies there is room for.
  Status Pump();
  // The next bytes, at most `limit`.
  Status Next(size_t limit, Piece* piece);
  // The piece, or its first bytes, was given to the NIC; then, in the same order, the NIC has done
  // with it.
  void Posted(const Piece& piece);
  void Completed(const Piece& piece);
  // Bytes that were not given to the NIC.
  size_t remaining() const { return unposted_; }
  bool copying() const { return ring_.copied() < ring_.copied_begun(); }
  bool addressable() const { return addressable_; }
  bool Quiet() { return ring_.Quiet(); }
  // Lets go of the user's memory; the NIC does not use it any more.
  void Release() { spans_.Release(); }
  // The same for a message that was given up.
  void Abandon() { spans_.Abandon(); }

  // Where the slots lie, and why there. Constant.
  const std::string& place() const { return place_; }
  // Bytes of payload that a CPU has copied. Any thread.
  uint64_t copied() const { return copied_.load(std::memory_order_relaxed); }
  void CountCopied(size_t bytes) { copied_.fetch_add(bytes, std::memory_order_relaxed); }

 private:
  std::shared_ptr<Device> device_;
  bool addressable_ = false;
  std::string place_;
  StagingRing ring_;
  std::shared_ptr<Registration> slots_;  // of the ring's memory, and so dropped first
  RegisteredSpans spans_;
  SpanCursor<ConstSpan> payload_;  // neither given to the NIC nor to the copier
  bool direct_ = false;            // payload_ is sent from where it lies
  size_t unposted_ = 0;
  uint64_t posted_slots_ = 0;
  size_t posted_bytes_ = 0;  // of the next slot
  uint64_t completed_slots_ = 0;
  std::vector<device::CopyPiece> pieces_;  // reused
  std::atomic<uint64_t> copied_{0};
};

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_SOURCE_H_
