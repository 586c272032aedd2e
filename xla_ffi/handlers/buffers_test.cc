// Poison: NaN wherever the type has one.
#include "xla_ffi/handlers/buffers.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

namespace hetccl::handlers {
namespace {

namespace ffi = xla::ffi;

std::vector<std::byte> Poisoned(ffi::DataType dtype, size_t bytes) {
  std::vector<std::byte> data(bytes, std::byte{0x11});
  Poison({data.data(), data.size(), dtype});
  return data;
}

// The bits of element `index`.
uint64_t Bits(const std::vector<std::byte>& data, size_t width, size_t index) {
  uint64_t bits = 0;
  std::memcpy(&bits, data.data() + index * width, width);
  return bits;
}

struct Float {
  ffi::DataType dtype;
  size_t width;            // bytes of one part
  int exponent, mantissa;  // bits
};

TEST(Poison, IeeeFloatsAndComplexBecomeNan) {
  for (const Float& type : std::vector<Float>{{ffi::F16, 2, 5, 10},
                                              {ffi::BF16, 2, 8, 7},
                                              {ffi::F32, 4, 8, 23},
                                              {ffi::F64, 8, 11, 52},
                                              {ffi::C64, 4, 8, 23},
                                              {ffi::C128, 8, 11, 52},
                                              {ffi::F8E5M2, 1, 5, 2},
                                              {ffi::F8E4M3, 1, 4, 3},
                                              {ffi::F8E3M4, 1, 3, 4}}) {
    const std::vector<std::byte> data = Poisoned(type.dtype, 16 * type.width);
    for (size_t i = 0; i < 16; ++i) {
      const uint64_t bits = Bits(data, type.width, i);
      const uint64_t exponent = bits >> type.mantissa & ((1ull << type.exponent) - 1);
      const uint64_t mantissa = bits & ((1ull << type.mantissa) - 1);
      EXPECT_EQ(exponent, (1ull << type.exponent) - 1) << static_cast<int>(type.dtype);
      EXPECT_NE(mantissa, 0u) << static_cast<int>(type.dtype);
    }
  }
  float value;
  std::memcpy(&value, Poisoned(ffi::F32, 4).data(), 4);
  EXPECT_TRUE(std::isnan(value));
}

TEST(Poison, FloatsWithOneNanGetThatOne) {
  const auto expect_all = [](ffi::DataType dtype, int bits) {
    for (std::byte byte : Poisoned(dtype, 5)) EXPECT_EQ(static_cast<int>(byte), bits);
  };
  expect_all(ffi::F8E4M3FN, 0x7F);
  expect_all(ffi::F8E4M3B11FNUZ, 0x80);
  expect_all(ffi::F8E4M3FNUZ, 0x80);
  expect_all(ffi::F8E5M2FNUZ, 0x80);
  expect_all(ffi::F8E8M0FNU, 0xFF);
}

TEST(Poison, TypesWithoutNanBecomeZero) {
  for (ffi::DataType dtype : {ffi::PRED, ffi::S4, ffi::S8, ffi::S16, ffi::S32, ffi::S64, ffi::U4,
                              ffi::U8, ffi::U16, ffi::U32, ffi::U64, ffi::F4E2M1FN}) {
    for (std::byte byte : Poisoned(dtype, 24)) EXPECT_EQ(byte, std::byte{0});
  }
}

TEST(Poison, EmptyBuffersAreLeftAlone) { Poison({nullptr, 0, ffi::F32}); }

TEST(Errors, CarryTheKindAndACode) {
  const ffi::Error error = ToError(Status(ErrorKind::kPeerLost, "right/0 is gone"));
  EXPECT_EQ(error.message(), "hetccl peer_lost: right/0 is gone");
  EXPECT_EQ(error.errc(), ffi::ErrorCode::kUnavailable);
  EXPECT_NE(NoEngine("x").message().find("initialize()"), std::string::npos);
}

}  // namespace
}  // namespace hetccl::handlers
