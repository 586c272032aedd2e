#include "xla_ffi/common/crc32c.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace hetccl {
namespace {

struct Way {
  const char* name;
  uint32_t (*crc)(uint32_t, const void*, size_t);
};
constexpr Way kWays[] = {{"dispatched", Crc32c}, {"tables", Crc32cByTables}};

// RFC 3720, B.4.
TEST(Crc32c, KnownValues) {
  const std::vector<uint8_t> zeros(32, 0), ones(32, 0xFF);
  std::vector<uint8_t> up(32), down(32);
  std::iota(up.begin(), up.end(), uint8_t{0});
  std::iota(down.rbegin(), down.rend(), uint8_t{0});
  const std::string digits = "123456789";
  for (const Way& way : kWays) {
    SCOPED_TRACE(way.name);
    EXPECT_EQ(way.crc(0, zeros.data(), 32), 0x8A9136AAu);
    EXPECT_EQ(way.crc(0, ones.data(), 32), 0x62A8AB43u);
    EXPECT_EQ(way.crc(0, up.data(), 32), 0x46DD794Eu);
    EXPECT_EQ(way.crc(0, down.data(), 32), 0x113FDB5Cu);
    EXPECT_EQ(way.crc(0, digits.data(), digits.size()), 0xE3069283u);
    EXPECT_EQ(way.crc(0, nullptr, 0), 0u);
  }
}

TEST(Crc32c, BothWaysAgreeOnEveryLengthAndPlace) {
  std::mt19937 random(1);
  std::vector<uint8_t> data(40000);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(random());
  for (size_t bytes : {1, 7, 8, 9, 63, 6143, 6144, 6145, 12288, 12345, 39000}) {
    for (size_t offset = 0; offset < 9; ++offset) {
      const uint32_t begun = static_cast<uint32_t>(random());
      EXPECT_EQ(Crc32c(begun, data.data() + offset, bytes),
                Crc32cByTables(begun, data.data() + offset, bytes))
          << bytes << " bytes at " << offset;
    }
  }
}

TEST(Crc32c, PartsGiveTheSameAsTheWhole) {
  std::vector<uint8_t> data(30000);
  std::iota(data.begin(), data.end(), uint8_t{3});
  const uint32_t whole = Crc32c(0, data.data(), data.size());
  for (size_t cut : {size_t{0}, size_t{1}, size_t{6150}, size_t{29999}}) {
    const uint32_t first = Crc32c(0, data.data(), cut);
    EXPECT_EQ(Crc32c(first, data.data() + cut, data.size() - cut), whole);
  }
}

TEST(Crc32c, EverySingleBitShows) {
  std::vector<uint8_t> data(7000, 0x5A);
  const uint32_t before = Crc32c(0, data.data(), data.size());
  for (size_t bit = 0; bit < data.size() * 8; bit += 13) {
    data[bit / 8] ^= 1 << bit % 8;
    EXPECT_NE(Crc32c(0, data.data(), data.size()), before) << "bit " << bit;
    data[bit / 8] ^= 1 << bit % 8;
  }
}

}  // namespace
}  // namespace hetccl
