// CRC-32C (Castagnoli), the checksum of iSCSI and SCTP, for which processors have an instruction.
#ifndef XLA_FFI_COMMON_CRC32C_H_
#define XLA_FFI_COMMON_CRC32C_H_

#include <cstddef>
#include <cstdint>

namespace hetccl {

// The checksum of what `crc` is the checksum of, followed by these bytes; start with 0. Uses the
// processor's instruction (SSE4.2, or the crc extension of ARMv8) where it has one. Thread-safe.
uint32_t Crc32c(uint32_t crc, const void* data, size_t bytes);

// The same by tables. For tests, and for processors without the instruction.
uint32_t Crc32cByTables(uint32_t crc, const void* data, size_t bytes);

// Whether Crc32c uses an instruction here.
bool Crc32cHasInstruction();

}  // namespace hetccl

#endif  // XLA_FFI_COMMON_CRC32C_H_
