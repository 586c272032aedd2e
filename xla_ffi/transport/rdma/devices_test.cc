#include "xla_ffi/transport/rdma/devices.h"

#include <gtest/gtest.h>

#include "xla_ffi/transport/rdma/verbs.h"

namespace hetccl::transport::rdma {
namespace {

TEST(Devices, RatesAsTheKernelPrintsThem) {
  EXPECT_EQ(ParseRate("400 Gb/sec (4X NDR)"), 400);
  EXPECT_EQ(ParseRate("2.5 Gb/sec (1X SDR)\n"), 2.5);
  EXPECT_EQ(ParseRate(""), 0);
  EXPECT_EQ(ParseRate("unknown"), 0);
  EXPECT_EQ(ParseRate("10 Mb/sec"), 0);
}

TEST(Devices, PciAddressesOnly) {
  EXPECT_TRUE(IsPciAddress("0000:3b:00.0"));
  EXPECT_TRUE(IsPciAddress("10000:ff:1f.7"));
  EXPECT_FALSE(IsPciAddress("vethA"));
  EXPECT_FALSE(IsPciAddress("0000:3b:00.0:1"));
  EXPECT_FALSE(IsPciAddress(""));
}

TEST(Devices, AMissingLibraryIsNamedWithTheVersionNeeded) {
  Verbs verbs;
  const Status status = LoadVerbsFrom("libnothing_like_verbs.so.1", &verbs);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("libnothing_like_verbs.so.1"), std::string::npos);
  EXPECT_NE(status.message().find("rdma-core 33"), std::string::npos);
}

TEST(Devices, MissingSymbolsAreNamed) {
  Verbs verbs;
  const Status status = LoadVerbsFrom("libm.so.6", &verbs);  // some other library
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("libm.so.6 lacks ibv_get_device_list@IBVERBS_1.1"),
            std::string::npos);
  EXPECT_NE(status.message().find("_ibv_query_gid_table@IBVERBS_1.11"), std::string::npos);
}

TEST(Devices, AreListedWhereThereIsTheLibrary) {
  const Verbs* verbs = nullptr;
  if (Status status = LoadVerbs(&verbs); !status.ok()) GTEST_SKIP() << status.message();
  std::vector<PortInfo> ports;
  const Status status = ListPorts(&ports);
  ASSERT_TRUE(status.ok()) << status.message();
  for (const PortInfo& port : ports) {
    EXPECT_NE(port.name, "");
    EXPECT_GE(port.port, 1);
    EXPECT_GE(port.active_mtu, 256);
    EXPECT_LE(port.active_mtu, 4096);
  }
}

}  // namespace
}  // namespace hetccl::transport::rdma
