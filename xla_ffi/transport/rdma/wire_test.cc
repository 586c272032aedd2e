#include "xla_ffi/transport/rdma/wire.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

namespace hetccl::transport::rdma {
namespace {

EndpointRecord Receiver() {
  EndpointRecord record;
  record.record_bytes = sizeof(record);
  record.role = Role::kReceiver;
  record.mtu = 5;
  record.slot_bytes = 4096;
  record.slots = 2;
  return record;
}

std::string Refusal(const EndpointRecord& record) {
  const Status status = CheckRecord(record, Role::kSender);
  return status.ok() ? "" : status.message();
}

TEST(Wire, TheRecordHasItsPlaces) {
  EXPECT_EQ(offsetof(EndpointRecord, magic), 0u);
  EXPECT_EQ(offsetof(EndpointRecord, version), 4u);
  EXPECT_EQ(offsetof(EndpointRecord, record_bytes), 6u);
  EXPECT_EQ(offsetof(EndpointRecord, role), 8u);
  EXPECT_EQ(offsetof(EndpointRecord, error), 9u);
  EXPECT_EQ(offsetof(EndpointRecord, mtu), 10u);
  EXPECT_EQ(offsetof(EndpointRecord, link_layer), 11u);
  EXPECT_EQ(offsetof(EndpointRecord, lid), 12u);
  EXPECT_EQ(offsetof(EndpointRecord, queue_pair), 16u);
  EXPECT_EQ(offsetof(EndpointRecord, packet_number), 20u);
  EXPECT_EQ(offsetof(EndpointRecord, gid), 24u);
  EXPECT_EQ(offsetof(EndpointRecord, address), 40u);
  EXPECT_EQ(offsetof(EndpointRecord, rkey), 48u);
  EXPECT_EQ(offsetof(EndpointRecord, flags), 52u);
  EXPECT_EQ(offsetof(EndpointRecord, slot_bytes), 56u);
  EXPECT_EQ(offsetof(EndpointRecord, slots), 60u);
  EXPECT_EQ(offsetof(EndpointRecord, text), 64u);
}

TEST(Wire, TakesAWorkingPeer) {
  EXPECT_EQ(Refusal(Receiver()), "");
  EndpointRecord sender = Receiver();
  sender.role = Role::kSender;
  sender.slot_bytes = 0;
  EXPECT_TRUE(CheckRecord(sender, Role::kReceiver).ok());
}

TEST(Wire, RefusesOthersWithTheReason) {
  EndpointRecord record = Receiver();
  record.magic ^= 1;
  EXPECT_NE(Refusal(record).find("magic"), std::string::npos);
  record = Receiver();
  record.version = 7;
  EXPECT_NE(Refusal(record).find("version 7"), std::string::npos);
  EXPECT_NE(Refusal(record).find("same jax_hetccl"), std::string::npos);
  record = Receiver();
  record.role = Role::kSender;
  EXPECT_NE(Refusal(record).find("same role"), std::string::npos);
  record = Receiver();
  record.mtu = 6;
  EXPECT_NE(Refusal(record).find("MTU"), std::string::npos);
  for (auto [slot_bytes, slots] : {std::pair<uint32_t, uint32_t>{100, 4},
                                   {4096, 1},
                                   {4097, 4},
                                   {4096, 5000},
                                   {128 << 20, 4}}) {
    record = Receiver();
    record.slot_bytes = slot_bytes;
    record.slots = slots;
    EXPECT_NE(Refusal(record).find("slots"), std::string::npos) << slot_bytes << " " << slots;
  }
}

TEST(Wire, PassesThePeersReasonOn) {
  EndpointRecord record = Receiver();
  record.error = 1;
  // Without an end.
  std::memset(record.text, 'x', sizeof(record.text));
  EXPECT_NE(Refusal(record).find(std::string(sizeof(record.text), 'x')), std::string::npos);
}

TEST(Wire, ImmediatesCarryKindAndValue) {
  const uint32_t immediate = Pack(Immediate::kChunk, 0x12345678);
  EXPECT_EQ(immediate, 0x32345678u);
  EXPECT_EQ(KindOf(immediate), Immediate::kChunk);
  EXPECT_EQ(ValueOf(immediate), 0x2345678u);
}

}  // namespace
}  // namespace hetccl::transport::rdma
