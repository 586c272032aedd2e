// Checksums between the payload's bytes on one socket, if the world asked for them.
//
// The bytes of each lane are cut into chunks of kChunkBytes; behind each chunk, the last one
// included, stand the four bytes of its CRC-32C, little endian. Both halves count alike, so nothing
// on the wire says where they are. Without checksums these classes let everything through.
#ifndef XLA_FFI_TRANSPORT_TCP_CHECKSUM_H_
#define XLA_FFI_TRANSPORT_TCP_CHECKSUM_H_

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "xla_ffi/common/status.h"
#include "xla_ffi/transport/message.h"

namespace hetccl::transport::tcp {

// Stays in a core's cache between the checksum and the copy by the kernel. Part of the protocol.
inline constexpr size_t kChunkBytes = 256 * 1024;

// A header as it is sent where there are checksums; without them only its first part is.
struct CheckedHeader {
  WireHeader header;
  uint32_t crc = 0;
};
static_assert(sizeof(CheckedHeader) == 200 && offsetof(CheckedHeader, crc) == sizeof(WireHeader));

// Bytes of a header on the wire.
inline size_t HeaderBytes(bool checksum) {
  return sizeof(WireHeader) + (checksum ? sizeof(CheckedHeader::crc) : 0);
}
// The header with its checksum.
CheckedHeader Checked(const WireHeader& header);
// kCorrupt if it is not as it was sent.
Status CheckSum(const CheckedHeader& checked);

// Where one lane is in its chunk. Used by one thread.
class ChunkCursor {
 public:
  explicit ChunkCursor(bool enabled) : enabled_(enabled) {}

  // The lane has this many payload bytes.
  void Begin(size_t bytes);
  // How many payload bytes may go before the next checksum, at most `limit`; none while it is its
  // turn.
  size_t Limit(size_t limit) const { return enabled_ ? std::min(limit, chunk_left_) : limit; }
  // Nothing is left of the payload, nor of its checksums.
  bool finished() const { return !enabled_ || (left_ == 0 && sum_left_ == 0); }

 protected:
  // The checksum's bytes that come next if `payload` bytes go first; null if payload comes next.
  bool SumFollows(size_t payload) const {
    return enabled_ && sum_left_ > 0 && payload == chunk_left_;
  }
  iovec SumPiece() { return {sum_bytes_ + sizeof(sum_bytes_) - sum_left_, sum_left_}; }
  // These have gone; returns how many of them were payload.
  size_t Count(size_t bytes);
  void NextChunk();

  const bool enabled_;
  size_t left_ = 0;        // payload bytes of the lane
  size_t chunk_left_ = 0;  // of those, bytes of the chunk under way
  size_t sum_left_ = 0;    // bytes of the chunk's checksum
  size_t begun_at_ = 0;    // place of the chunk in the lane
  size_t chunk_ = 0;       // its size
  char sum_bytes_[4] = {};
  uint32_t crc_ = 0;
};

class SendSums final : public ChunkCursor {
 public:
  using ChunkCursor::ChunkCursor;
  // Takes the pieces that are about to be sent, all of them payload that Limit allows, into the
  // checksum; adds the checksum behind them if its turn comes. Returns the number of pieces. May be
  // called with the same bytes again.
  int Cover(iovec* pieces, int count);
  // The first `bytes` of what Cover returned were sent; returns how many were payload.
  size_t Sent(size_t bytes);

 private:
  size_t covered_ = 0;  // bytes ahead that are in crc_ but were not sent
};

class ReceiveSums final : public ChunkCursor {
 public:
  using ChunkCursor::ChunkCursor;
  // Adds the place for the checksum behind pieces that are about to be filled, if its turn comes.
  int Extend(iovec* pieces, int count);
  // The first `bytes` of these pieces were filled, `*payload` of them with payload. kCorrupt if a
  // chunk is not what its sender sent; the text says which bytes of the lane.
  Status Received(const iovec* pieces, size_t bytes, size_t* payload);
};

}  // namespace hetccl::transport::tcp

#endif  // XLA_FFI_TRANSPORT_TCP_CHECKSUM_H_
