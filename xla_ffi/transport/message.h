// What travels over a channel: one fixed header, then the payload's bytes.
#ifndef XLA_FFI_TRANSPORT_MESSAGE_H_
#define XLA_FFI_TRANSPORT_MESSAGE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "xla_ffi/common/status.h"

namespace hetccl::transport {

// Raised whenever the bytes on the wire change their meaning. Both sides must have the same.
inline constexpr uint16_t kProtocolVersion = 1;
inline constexpr uint32_t kMagic = 0x4C434348;  // "HCCL"

enum class MessageType : uint32_t {
  kData = 1,
  kGoodbye = 2,  // the sender closes its engine in an orderly way; no message follows
};

// The header of every message, little endian as all supported hosts are. It says enough for the
// receiver to prove that both sides mean the same operation before any payload is placed.
struct WireHeader {
  uint32_t magic = kMagic;
  uint16_t version = kProtocolVersion;
  uint16_t header_bytes = 0;
  MessageType type = MessageType::kData;
  uint32_t index = 0;       // position of the exchange in its program
  uint64_t epoch = 0;       // identity of the world
  uint64_t program = 0;     // identity of the program's list of exchanges
  uint64_t occurrence = 0;  // how often (program, index) was sent on this channel before
  uint64_t wire_id = 0;     // fingerprint of operation, axis, dtype and element count
  uint64_t payload_bytes = 0;
  uint32_t source = 0;  // ranks
  uint32_t destination = 0;
  char text[128] = {};  // the operation for people, cut to fit, zero-terminated
};
static_assert(sizeof(WireHeader) == 192, "the header's layout is part of the protocol");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire format is little endian");

// Fills in the fields that are the same in every header.
WireHeader MakeHeader(MessageType type);
void SetText(WireHeader* header, std::string_view text);
// The text, however it was cut or corrupted.
std::string Text(const WireHeader& header);
// kCorrupt unless the header is one of this protocol version with a known type.
Status CheckHeader(const WireHeader& header);

// One contiguous part of a payload; memory that somebody else owns.
struct ConstSpan {
  const std::byte* data;
  size_t size;
};
struct MutableSpan {
  std::byte* data;
  size_t size;
};

// A payload in its order on the wire. Empty spans are allowed.
using ConstPayload = std::vector<ConstSpan>;
using MutablePayload = std::vector<MutableSpan>;

}  // namespace hetccl::transport

#endif  // XLA_FFI_TRANSPORT_MESSAGE_H_
