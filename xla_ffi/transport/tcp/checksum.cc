#include "xla_ffi/transport/tcp/checksum.h"

#include <cstdio>
#include <cstring>

#include "xla_ffi/common/crc32c.h"

namespace hetccl::transport::tcp {
namespace {

size_t TotalOf(const iovec* pieces, int count) {
  size_t total = 0;
  for (int i = 0; i < count; ++i) total += pieces[i].iov_len;
  return total;
}

// The checksum of the bytes [skip, skip + bytes) of these pieces, behind `crc`.
uint32_t Add(uint32_t crc, const iovec* pieces, size_t skip, size_t bytes) {
  for (; bytes > 0; ++pieces) {
    if (skip >= pieces->iov_len) {
      skip -= pieces->iov_len;
      continue;
    }
    const size_t part = std::min(bytes, pieces->iov_len - skip);
    crc = Crc32c(crc, static_cast<const char*>(pieces->iov_base) + skip, part);
    bytes -= part;
    skip = 0;
  }
  return crc;
}

Status Mismatch(const std::string& what, uint32_t found, uint32_t sent) {
  char sums[64];
  std::snprintf(sums, sizeof(sums), " arrived with CRC-32C %08x, sent with %08x", found, sent);
  return Status(ErrorKind::kCorrupt, what + sums);
}

}  // namespace

CheckedHeader Checked(const WireHeader& header) {
  return {header, Crc32c(0, &header, sizeof(header))};
}

Status CheckSum(const CheckedHeader& checked) {
  const uint32_t crc = Crc32c(0, &checked.header, sizeof(checked.header));
  if (crc == checked.crc) return Status();
  return Mismatch("a message's header", crc, checked.crc);
}

void ChunkCursor::Begin(size_t bytes) {
  left_ = bytes;
  begun_at_ = chunk_ = sum_left_ = 0;
  NextChunk();
}

void ChunkCursor::NextChunk() {
  begun_at_ += chunk_;
  chunk_ = chunk_left_ = std::min(left_, kChunkBytes);
  sum_left_ = chunk_ > 0 ? sizeof(sum_bytes_) : 0;
  crc_ = 0;
}

size_t ChunkCursor::Count(size_t bytes) {
  const size_t payload = std::min(bytes, chunk_left_);
  left_ -= payload;
  chunk_left_ -= payload;
  sum_left_ -= bytes - payload;
  return payload;
}

int SendSums::Cover(iovec* pieces, int count) {
  if (!enabled_) return count;
  const size_t payload = TotalOf(pieces, count);
  if (payload > covered_) {
    crc_ = Add(crc_, pieces, covered_, payload - covered_);
    covered_ = payload;
  }
  if (!SumFollows(payload)) return count;
  std::memcpy(sum_bytes_, &crc_, sizeof(crc_));
  pieces[count] = SumPiece();
  return count + 1;
}

size_t SendSums::Sent(size_t bytes) {
  if (!enabled_) return bytes;
  const size_t payload = Count(bytes);
  covered_ -= payload;
  if (chunk_left_ == 0 && sum_left_ == 0) NextChunk();
  return payload;
}

int ReceiveSums::Extend(iovec* pieces, int count) {
  if (!SumFollows(TotalOf(pieces, count))) return count;
  pieces[count] = SumPiece();
  return count + 1;
}

Status ReceiveSums::Received(const iovec* pieces, size_t bytes, size_t* payload) {
  *payload = bytes;
  if (!enabled_) return Status();
  *payload = Count(bytes);
  crc_ = Add(crc_, pieces, 0, *payload);
  if (chunk_left_ > 0 || sum_left_ > 0 || chunk_ == 0) return Status();
  uint32_t sent;
  std::memcpy(&sent, sum_bytes_, sizeof(sent));
  if (sent != crc_) {
    const std::string end = std::to_string(begun_at_ + chunk_);
    return Mismatch("bytes " + std::to_string(begun_at_) + " to " + end, crc_, sent);
  }
  NextChunk();
  return Status();
}

}  // namespace hetccl::transport::tcp
