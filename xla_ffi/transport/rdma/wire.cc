#include "xla_ffi/transport/rdma/wire.h"

#include <cstring>

namespace hetccl::transport::rdma {

namespace {
constexpr uint64_t kLeastSlotBytes = 4096;
}  // namespace

bool SensibleSlots(uint64_t slot_bytes, uint64_t slots) {
  return slot_bytes >= kLeastSlotBytes && slot_bytes <= (64 << 20) && slot_bytes % 64 == 0 &&
         slots >= 2 && slots <= 1024;
}

Status CheckRecord(const EndpointRecord& record, Role mine) {
  if (record.magic != kRecordMagic) {
    return InternalError("the peer's endpoint record does not start with the magic number");
  }
  if (record.version != kWireVersion || record.record_bytes != sizeof(EndpointRecord)) {
    return InternalError("the peer speaks version " + std::to_string(record.version) +
                         " of the RDMA protocol, this side " + std::to_string(kWireVersion) +
                         "; install the same jax_hetccl in every cluster");
  }
  if (record.error != 0) {
    const std::string text(record.text, ::strnlen(record.text, sizeof(record.text)));
    return InternalError("the peer cannot use RDMA: " + text);
  }
  const Role other = mine == Role::kSender ? Role::kReceiver : Role::kSender;
  if (record.role != other) return InternalError("both ends of the channel have the same role");
  if (record.mtu < 1 || record.mtu > 5) {
    return InternalError("the peer's endpoint record has no valid MTU");
  }
  const uint64_t slot_bytes = other == Role::kReceiver ? record.slot_bytes : kLeastSlotBytes;
  if (!SensibleSlots(slot_bytes, record.slots)) {
    return InternalError("the peer's endpoint record describes no sensible slots");
  }
  return Status();
}

}  // namespace hetccl::transport::rdma
