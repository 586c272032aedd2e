#include "xla_ffi/common/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define HETCCL_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__) && (!defined(__clang__) || __clang_major__ >= 16)  // older ones lack it
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define HETCCL_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace hetccl {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // reflected
// The instruction takes three cycles but can begin every cycle: three streams of this length run
// side by side.
constexpr size_t kStream = 2048;

using Table = std::array<uint32_t, 256>;

struct Tables {
  std::array<Table, 8> slices;  // slices[k]: a byte followed by k zero bytes
  std::array<Table, 4> shift;   // kStream zero bytes behind the bytes of a checksum
};

Tables MakeTables() {
  Tables tables;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    tables.slices[0][byte] = crc;
  }
  for (size_t k = 1; k < tables.slices.size(); ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables.slices[k - 1][byte];
      tables.slices[k][byte] = tables.slices[0][before & 0xFF] ^ (before >> 8);
    }
  }
  std::array<uint32_t, 32> bits;  // what zeros make of each bit; the rest is linear
  for (int bit = 0; bit < 32; ++bit) {
    uint32_t crc = uint32_t{1} << bit;
    for (size_t i = 0; i < kStream; ++i) crc = tables.slices[0][crc & 0xFF] ^ (crc >> 8);
    bits[bit] = crc;
  }
  for (int place = 0; place < 4; ++place) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = 0;
      for (int bit = 0; bit < 8; ++bit) crc ^= byte >> bit & 1 ? bits[8 * place + bit] : 0;
      tables.shift[place][byte] = crc;
    }
  }
  return tables;
}

const Tables& GetTables() {
  static const Tables tables = MakeTables();
  return tables;
}

uint64_t Load(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

#ifdef HETCCL_CRC_TARGET

#if defined(__x86_64__)
HETCCL_CRC_TARGET inline uint32_t Add(uint32_t crc, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
}
HETCCL_CRC_TARGET inline uint32_t Add(uint32_t crc, uint8_t byte) {
  return _mm_crc32_u8(crc, byte);
}

bool FindInstruction() { return __builtin_cpu_supports("sse4.2") != 0; }
#else
HETCCL_CRC_TARGET inline uint32_t Add(uint32_t crc, uint64_t word) { return __crc32cd(crc, word); }
HETCCL_CRC_TARGET inline uint32_t Add(uint32_t crc, uint8_t byte) { return __crc32cb(crc, byte); }

bool FindInstruction() { return (::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

uint32_t Shift(const Tables& tables, uint32_t crc) {
  return tables.shift[0][crc & 0xFF] ^ tables.shift[1][crc >> 8 & 0xFF] ^
         tables.shift[2][crc >> 16 & 0xFF] ^ tables.shift[3][crc >> 24];
}

HETCCL_CRC_TARGET uint32_t ByInstruction(uint32_t crc, const uint8_t* data, size_t bytes) {
  crc = ~crc;
  if (bytes >= 3 * kStream) {
    const Tables& tables = GetTables();
    for (; bytes >= 3 * kStream; bytes -= 3 * kStream, data += 3 * kStream) {
      uint32_t second = 0;
      uint32_t third = 0;
      for (size_t at = 0; at < kStream; at += sizeof(uint64_t)) {
        crc = Add(crc, Load(data + at));
        second = Add(second, Load(data + kStream + at));
        third = Add(third, Load(data + 2 * kStream + at));
      }
      crc = Shift(tables, Shift(tables, crc) ^ second) ^ third;
    }
  }
  for (; bytes >= sizeof(uint64_t); bytes -= sizeof(uint64_t), data += sizeof(uint64_t)) {
    crc = Add(crc, Load(data));
  }
  for (; bytes > 0; --bytes) crc = Add(crc, *data++);
  return ~crc;
}

#else

bool FindInstruction() { return false; }
uint32_t ByInstruction(uint32_t crc, const uint8_t* data, size_t bytes) {
  return Crc32cByTables(crc, data, bytes);
}

#endif

}  // namespace

bool Crc32cHasInstruction() {
  static const bool found = FindInstruction();
  return found;
}

uint32_t Crc32cByTables(uint32_t crc, const void* data, size_t bytes) {
  const std::array<Table, 8>& slices = GetTables().slices;
  const auto* at = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (; bytes >= sizeof(uint64_t); bytes -= sizeof(uint64_t), at += sizeof(uint64_t)) {
    const uint64_t word = Load(at) ^ crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= slices[7 - k][word >> 8 * k & 0xFF];
  }
  for (; bytes > 0; --bytes) crc = slices[0][(crc ^ *at++) & 0xFF] ^ (crc >> 8);
  return ~crc;
}

uint32_t Crc32c(uint32_t crc, const void* data, size_t bytes) {
  if (!Crc32cHasInstruction()) return Crc32cByTables(crc, data, bytes);
  return ByInstruction(crc, static_cast<const uint8_t*>(data), bytes);
}

}  // namespace hetccl
