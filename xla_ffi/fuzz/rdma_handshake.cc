// What the other end of an rdma channel says over its socket until the channel is there: its
// record, its verdicts and reasons. The NIC is one that says yes to everything.
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include "xla_ffi/fuzz/input.h"
#include "xla_ffi/transport/rdma/device.h"
#include "xla_ffi/transport/rdma/handshake.h"
#include "xla_ffi/transport/rdma/queue_pair.h"

namespace {

using namespace hetccl;
using namespace hetccl::transport::rdma;

// One queue pair at a time, since verbs are plain functions.
struct Nic {
  abi::Device kind = {};
  abi::Context context = {};
  abi::CompChannel channel = {};
  abi::Cq queue = {};
  abi::Qp pair = {};
  UniqueFd events;
  std::vector<abi::Wc> completions;
};
Nic nic;

Verbs Agreeable() {
  Verbs verbs = {};
  verbs.query_port = [](abi::Context*, uint8_t, abi::PortAttr* port) {
    *port = {};
    port->state = abi::kPortActive;
    port->active_mtu = 5;
    port->link_layer = abi::kLinkEthernet;
    return 0;
  };
  verbs.query_gid_ex = [](abi::Context*, uint32_t, uint32_t, abi::GidEntry* gid, uint32_t, size_t) {
    *gid = {};
    return 0;
  };
  verbs.create_comp_channel = [](abi::Context*) { return &nic.channel; };
  verbs.destroy_comp_channel = [](abi::CompChannel*) { return 0; };
  verbs.create_cq = [](abi::Context*, int, void*, abi::CompChannel*, int) { return &nic.queue; };
  verbs.destroy_cq = [](abi::Cq*) { return 0; };
  verbs.create_qp = [](abi::Pd*, abi::QpInitAttr*) { return &nic.pair; };
  verbs.destroy_qp = [](abi::Qp*) { return 0; };
  verbs.modify_qp = [](abi::Qp*, abi::QpAttr*, int) { return 0; };
  verbs.dealloc_pd = [](abi::Pd*) { return 0; };
  verbs.close_device = [](abi::Context*) { return 0; };
  nic.events = UniqueFd(::eventfd(0, EFD_CLOEXEC));
  nic.channel.fd = nic.events.get();
  nic.kind.transport_type = abi::kTransportIb;
  nic.context.device = &nic.kind;
  nic.context.ops.post_recv = [](abi::Qp*, abi::RecvWr*, abi::RecvWr**) { return 0; };
  // A write has ended as soon as it was posted.
  nic.context.ops.post_send = [](abi::Qp*, abi::SendWr* request, abi::SendWr**) {
    abi::Wc wc = {};
    wc.wr_id = request->wr_id;
    nic.completions.push_back(wc);
    return 0;
  };
  nic.context.ops.poll_cq = [](abi::Cq*, int, abi::Wc* wcs) {
    const int count = static_cast<int>(nic.completions.size());
    std::copy(nic.completions.begin(), nic.completions.end(), wcs);
    nic.completions.clear();
    return count;
  };
  return verbs;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const Role role = input.Byte() % 2 == 0 ? Role::kSender : Role::kReceiver;
  static const auto* verbs = new Verbs(Agreeable());
  auto device = std::make_shared<Device>(*verbs, &nic.context, nullptr, "fuzz0");
  Options options;
  options.device = "fuzz0";
  options.timeout = 1;
  options.retry_count = 1;
  EndpointRecord mine;
  mine.record_bytes = sizeof(mine);
  mine.role = role;
  std::unique_ptr<QueuePair> pair;
  fuzz::Require(QueuePair::Make(device, options, {8, 8}, &mine, &pair).ok());
  fuzz::Require(pair->PostReceives(8).ok());
  // The peer's probe is there at once, if it is one.
  nic.completions.clear();
  abi::Wc probe = {};
  probe.wr_id = ~uint64_t{0};
  const uint8_t kind = input.Byte();
  probe.imm_data = htonl(kind < 0xF0 ? Pack(Immediate::kProbe, 0) : uint32_t{kind} << 28);
  nic.completions.push_back(probe);
  auto [here, there] = fuzz::SocketPair();
  fuzz::Say(there, input.Take(input.size()));
  ::shutdown(there.get(), SHUT_WR);
  auto theirs = std::make_unique<EndpointRecord>();
  uint64_t bytes = 0;
  const Status status = Handshake(here.get(), options, pair.get(), mine, &bytes, 0, theirs.get());
  if (status.ok()) {
    fuzz::Require(CheckRecord(*theirs, role).ok());
  } else {
    fuzz::Require(!status.message().empty() && status.message().size() < 2000);
  }
  return 0;
}
