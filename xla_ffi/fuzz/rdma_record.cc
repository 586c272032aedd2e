// The record with which the other end of an rdma channel describes itself.
#include "xla_ffi/fuzz/input.h"
#include "xla_ffi/transport/rdma/wire.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace hetccl;
  using namespace hetccl::transport::rdma;
  fuzz::Input input(data, size);
  const Role mine = input.Byte() % 2 == 0 ? Role::kSender : Role::kReceiver;
  // On the heap, so that a read beyond its end is seen.
  auto record = std::make_unique<EndpointRecord>();
  input.Copy(record.get(), sizeof(*record));
  const Status status = CheckRecord(*record, mine);
  if (!status.ok()) {
    fuzz::Require(!status.message().empty() && status.message().size() < 1000);
    return 0;
  }
  // What the channel then relies on.
  fuzz::Require(record->role != mine && record->error == 0);
  fuzz::Require(record->mtu >= 1 && record->mtu <= 5);
  fuzz::Require(record->slots >= 2 && record->slots <= 1024);
  if (mine == Role::kSender) {
    fuzz::Require(record->slot_bytes >= kPayloadOffset && record->slot_bytes % 64 == 0);
    fuzz::Require(uint64_t{record->slot_bytes} * record->slots <= uint64_t{64} << 30);
  }
  return 0;
}
