// The protocol between the two ends of an RDMA channel: all that another implementation needs.
//
// A channel is one direction between two ranks: one RC queue pair on each side and one stream
// socket. All integers are little endian unless said otherwise.
//
// 1. Both send an EndpointRecord on the socket, then read the other's. A side that cannot go on
//    sends one with `error` set and the reason in `text`.
// 2. Both post their receives (counts: see below), move their queue pair to RTS with the other's
//    numbers, and send one byte 'R'. Path MTU: the smaller of the two records' `mtu`.
// 3. After the other's 'R', both write 8 bytes to the other's `address` + kProbeOffset with
//    immediate kProbe, and wait for their own completion and for the other's immediate.
// 4. Both send a verdict on the socket: 'K'; or 'F' and then a text of 1 to 255 bytes behind its
//    length in one byte. The receiver sends its 'K' first, and waits for the sender's as long as
//    the socket is there; the sender sends its own as the last step, only after the receiver's and
//    with nothing behind it that may fail. So 'K' from both sides means a channel, to both; an 'F'
//    may come at any time.
// From then on the socket carries no data: a side that closes sends 'G', the sender only once all
// of its writes have completed; its end without a 'G' means that the side died.
//
// Memory. The receiver's record describes its slots: `slots` of `slot_bytes` each, from `address`
// on, key `rkey`. The sender's describes its SenderBoard, with the number of slots that it can use
// and `slot_bytes` zero; below, `slots` is the smaller number. Everything is moved by RDMA write;
// what must be noticed carries an immediate: kind in the upper 4 bits, value in the lower 28 (the
// immediate itself is big endian on the wire, as always).
//
// From the sender. The n-th slot write goes to slot n % slots; it may be done if n < freed + slots.
//   kMessage  a slot holds a WireHeader, and the whole payload at kPayloadOffset. value: 0
//   kHeader   a slot holds only the WireHeader of a message whose payload follows. value: 0
//   kChunk    a slot holds the payload's next bytes from offset 0 on. value: their number. Every
//             chunk but the message's last fills its slot.
//   kDirect   the memory of the oldest grant has been filled with the payload's next bytes. value:
//             the grant's number, modulo 2^28
// A slot's or grant's bytes may come by several writes, the last of which has the immediate.
//
// From the receiver, into the sender's board:
//   kCredit   `freed` was advanced to the number of slots emptied so far. value: that, mod 2^28
//   kGrant    grants were added in their order, the g-th at grants[g % kGrants]. value: how many.
//             At most kGrants are not filled at any time, and together they are no larger than the
//             payload of the message under way.
//   kUseSlots what no grant covers of the message under way is to come in slots. value: 0
//
// After kHeader the sender looks at the receiver's record: without kGrantsMemory the payload
// follows in slots at once. With it the sender waits for kGrant and kUseSlots and does what they
// say, grants first.
//
// Receives. The receiver keeps slots + kGrants + 1 receives posted, and frees a slot or adds a
// grant only after it has posted the receive anew that the slot's or grant's immediate took; it
// sends at most one kCredit for each slot and one kUseSlots for each message. So the sender, which
// keeps 2 * slots + kGrants + 2 receives posted whenever it begins a message, never makes the
// other's NIC answer "receiver not ready", nor the other way round. With kPagesOnDemand in the
// receiver's record its NIC may answer so all the same while it fetches a page of granted memory:
// the sender's is to try again without end.
#ifndef XLA_FFI_TRANSPORT_RDMA_WIRE_H_
#define XLA_FFI_TRANSPORT_RDMA_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "xla_ffi/common/status.h"
#include "xla_ffi/transport/message.h"

namespace hetccl::transport::rdma {

inline constexpr uint32_t kRecordMagic = 0x52434348;  // "HCCR"
inline constexpr uint16_t kWireVersion = 1;

inline constexpr size_t kPayloadOffset = sizeof(WireHeader);
inline constexpr size_t kProbeOffset = 8;
inline constexpr uint32_t kGrants = 16;

enum class Role : uint8_t { kSender = 1, kReceiver = 2 };

enum RecordFlags : uint32_t { kGrantsMemory = 1, kPagesOnDemand = 2 };

struct EndpointRecord {
  uint32_t magic = kRecordMagic;
  uint16_t version = kWireVersion;
  uint16_t record_bytes = 0;
  Role role = Role::kSender;
  uint8_t error = 0;
  uint8_t mtu = 0;         // as in the verbs: 1: 256 bytes, ... 5: 4096 bytes
  uint8_t link_layer = 0;  // as in the verbs: 1 InfiniBand, 2 Ethernet
  uint16_t lid = 0;
  uint16_t unused = 0;
  uint32_t queue_pair = 0;
  uint32_t packet_number = 0;  // the first that this side sends, 24 bits
  uint8_t gid[16] = {};
  uint64_t address = 0;
  uint32_t rkey = 0;
  uint32_t flags = 0;
  uint32_t slot_bytes = 0;
  uint32_t slots = 0;
  char text[192] = {};  // if error: why, zero-terminated
};
static_assert(sizeof(EndpointRecord) == 256, "the record's layout is part of the protocol");

// Memory of the receiver that the sender may fill once.
struct Grant {
  uint64_t address;
  uint32_t rkey;
  uint32_t bytes;
};
static_assert(sizeof(Grant) == 16);

// What the receiver writes to.
struct SenderBoard {
  uint64_t freed;  // slots emptied since the channel was made
  uint64_t probe;
  uint64_t unused[6];
  Grant grants[kGrants];
};
static_assert(offsetof(SenderBoard, probe) == kProbeOffset);
static_assert(offsetof(SenderBoard, grants) == 64);

enum class Immediate : uint32_t {
  kMessage = 1,
  kHeader = 2,
  kChunk = 3,
  kDirect = 4,
  kCredit = 5,
  kGrant = 6,
  kUseSlots = 7,
  kProbe = 8,
};

inline constexpr uint32_t kValueMask = (1u << 28) - 1;

inline constexpr uint32_t Pack(Immediate kind, uint64_t value) {
  return static_cast<uint32_t>(kind) << 28 | (static_cast<uint32_t>(value) & kValueMask);
}
inline constexpr Immediate KindOf(uint32_t immediate) {
  return static_cast<Immediate>(immediate >> 28);
}
inline constexpr uint32_t ValueOf(uint32_t immediate) { return immediate & kValueMask; }

// Slots that this protocol can describe: multiples of 64, so that payloads are aligned.
bool SensibleSlots(uint64_t slot_bytes, uint64_t slots);

// kInternal with the peer's reason, or with what is wrong, unless this is the record of a working
// peer in the role opposite to `mine`.
Status CheckRecord(const EndpointRecord& record, Role mine);

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_WIRE_H_
