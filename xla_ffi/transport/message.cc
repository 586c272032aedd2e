#include "xla_ffi/transport/message.h"

#include <algorithm>
#include <cstring>

namespace hetccl::transport {

WireHeader MakeHeader(MessageType type) {
  WireHeader header;
  header.header_bytes = sizeof(WireHeader);
  header.type = type;
  return header;
}

void SetText(WireHeader* header, std::string_view text) {
  const size_t size = std::min(text.size(), sizeof(header->text) - 1);
  std::memset(header->text, 0, sizeof(header->text));
  std::memcpy(header->text, text.data(), size);
}

std::string Text(const WireHeader& header) {
  std::string text(header.text, ::strnlen(header.text, sizeof(header.text)));
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text;
}

Status CheckHeader(const WireHeader& header) {
  if (header.magic != kMagic) {
    return Status(ErrorKind::kCorrupt, "a message does not start with the protocol's magic number");
  }
  if (header.version != kProtocolVersion || header.header_bytes != sizeof(WireHeader)) {
    return Status(ErrorKind::kCorrupt, "the peer speaks protocol version " +
                                           std::to_string(header.version) + ", this side speaks " +
                                           std::to_string(kProtocolVersion) +
                                           "; install the same jax_hetccl in every cluster");
  }
  if (header.type != MessageType::kData && header.type != MessageType::kGoodbye) {
    return Status(ErrorKind::kCorrupt, "a message has unknown type " +
                                           std::to_string(static_cast<uint32_t>(header.type)));
  }
  return Status();
}

}  // namespace hetccl::transport
