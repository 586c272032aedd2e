#include "xla_ffi/transport/rdma/queue_pair.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "xla_ffi/common/fd.h"
#include "xla_ffi/transport/rdma/completion_error.h"

namespace hetccl::transport::rdma {
namespace {

// A header and 64 bytes of payload.
constexpr uint32_t kInlineBytes = kPayloadOffset + 64;
constexpr uint64_t kReceiveId = ~uint64_t{0};  // others are numbers of writes
constexpr int kPolled = 16;                    // completions at once
constexpr uint8_t kHopLimit = 64;
// The peer has receives posted for all that may come; if not, it broke the protocol, and some
// tenths of a second are enough to tell.
constexpr uint8_t kRnrRetries = 6;
constexpr uint8_t kRnrTimer = 20;  // 10.24 ms
// A NIC that fetches a page of memory that it pages on demand answers the same, as often as it
// takes: the exchange's own time limit is the bound. It asks to be tried again soon.
constexpr uint8_t kRnrWithoutEnd = 7;
constexpr uint8_t kPageTimer = 12;  // 0.64 ms
constexpr uint32_t kPacketNumberMask = 0xFFFFFF;

uint32_t RandomPacketNumber() { return std::random_device()() & kPacketNumberMask; }

}  // namespace

QueuePair::QueuePair(std::shared_ptr<Device> device, const Options& options, const Depths& depths)
    : device_(std::move(device)),
      options_(options),
      depths_(depths),
      where_("rdma " + options.device + " port " + std::to_string(options.port)) {}

QueuePair::~QueuePair() {
  const Verbs& verbs = device_->verbs();
  if (qp_ != nullptr) verbs.destroy_qp(qp_);
  if (cq_ != nullptr) verbs.destroy_cq(cq_);
  if (channel_ != nullptr) verbs.destroy_comp_channel(channel_);
}

Status QueuePair::Make(std::shared_ptr<Device> device, const Options& options, const Depths& depths,
                       EndpointRecord* mine, std::unique_ptr<QueuePair>* out) {
  std::unique_ptr<QueuePair> made(new QueuePair(std::move(device), options, depths));
  const Verbs& verbs = made->device_->verbs();
  abi::Context* context = made->device_->context();
  if (context->device->transport_type != abi::kTransportIb) {
    return InternalError(made->where_ +
                         ": the device is not InfiniBand or RoCE; iWARP is not supported");
  }
  abi::PortAttr port = {};
  if (int error = verbs.query_port(context, static_cast<uint8_t>(options.port), &port)) {
    return InternalError(ErrnoMessage(made->where_ + ": querying the port", error));
  }
  if (port.state != abi::kPortActive) {
    return InternalError(made->where_ + ": the port is not active: is its link up?");
  }
  mine->mtu = static_cast<uint8_t>(port.active_mtu);
  mine->link_layer = port.link_layer;
  mine->lid = port.lid;
  abi::GidEntry gid = {};
  if (verbs.query_gid_ex(context, static_cast<uint32_t>(options.port),
                         static_cast<uint32_t>(options.gid_index), &gid, 0, sizeof(gid)) == 0) {
    std::memcpy(mine->gid, gid.gid.raw, sizeof(mine->gid));
  } else if (port.link_layer == abi::kLinkEthernet) {
    return InternalError(made->where_ + ": the port has no GID " +
                         std::to_string(options.gid_index) +
                         "; leave HETCCL_IB_GID_INDEX unset to have one chosen");
  }
  if (Status status = made->Create(); !status.ok()) return status;
  if (Status status = made->Initialize(); !status.ok()) return status;
  mine->queue_pair = made->qp_->qp_num;
  mine->packet_number = RandomPacketNumber();
  *out = std::move(made);
  return Status();
}

Status QueuePair::Create() {
  const Verbs& verbs = device_->verbs();
  channel_ = verbs.create_comp_channel(device_->context());
  if (channel_ == nullptr || !SetNonBlocking(channel_->fd)) {
    return InternalError(ErrnoMessage(where_ + ": completion channel", errno));
  }
  cq_ = verbs.create_cq(device_->context(), static_cast<int>(depths_.writes + depths_.receives),
                        nullptr, channel_, 0);
  if (cq_ == nullptr) return InternalError(ErrnoMessage(where_ + ": completion queue", errno));
  // NICs take different amounts of inline data; without any a header only costs one more read.
  for (uint32_t inline_bytes : {kInlineBytes, static_cast<uint32_t>(kPayloadOffset), 64u, 0u}) {
    abi::QpInitAttr attr = {};
    attr.send_cq = cq_;
    attr.recv_cq = cq_;
    attr.qp_type = abi::kQpRc;
    attr.cap = {depths_.writes, depths_.receives, 1, 1, inline_bytes};
    qp_ = verbs.create_qp(device_->pd(), &attr);
    if (qp_ == nullptr) continue;
    inline_bytes_ = attr.cap.max_inline_data;
    return Status();
  }
  return InternalError(ErrnoMessage(where_ + ": queue pair", errno));
}

Status QueuePair::Initialize() {
  abi::QpAttr attr = {};
  attr.qp_state = abi::kQpInit;
  attr.port_num = static_cast<uint8_t>(options_.port);
  attr.qp_access_flags = abi::kAccessRemoteWrite | abi::kAccessLocalWrite;
  const int error = device_->verbs().modify_qp(
      qp_, &attr, abi::kAttrState | abi::kAttrPkeyIndex | abi::kAttrPort | abi::kAttrAccessFlags);
  return error == 0 ? Status()
                    : InternalError(ErrnoMessage(where_ + ": queue pair to INIT", error));
}

Status QueuePair::Connect(const EndpointRecord& mine, const EndpointRecord& theirs) {
  if (mine.link_layer != theirs.link_layer) {
    return InternalError(where_ + ": one end is InfiniBand, the other Ethernet");
  }
  abi::QpAttr ready = {};
  ready.qp_state = abi::kQpRtr;
  ready.path_mtu = std::min(mine.mtu, theirs.mtu);
  ready.dest_qp_num = theirs.queue_pair;
  ready.rq_psn = theirs.packet_number;
  ready.max_dest_rd_atomic = 1;
  ready.min_rnr_timer = (mine.flags & kPagesOnDemand) != 0 ? kPageTimer : kRnrTimer;
  ready.ah_attr.port_num = static_cast<uint8_t>(options_.port);
  ready.ah_attr.dlid = theirs.lid;
  // A subnet's prefix is the first half of a GID; inside of one InfiniBand needs no global route.
  const bool global = mine.link_layer == abi::kLinkEthernet ||
                      std::memcmp(mine.gid, theirs.gid, sizeof(mine.gid) / 2) != 0;
  if (global) {
    ready.ah_attr.is_global = 1;
    std::memcpy(ready.ah_attr.grh.dgid.raw, theirs.gid, sizeof(theirs.gid));
    ready.ah_attr.grh.sgid_index = static_cast<uint8_t>(options_.gid_index);
    ready.ah_attr.grh.hop_limit = kHopLimit;
    ready.ah_attr.grh.traffic_class = static_cast<uint8_t>(options_.traffic_class);
  }
  const Verbs& verbs = device_->verbs();
  int error =
      verbs.modify_qp(qp_, &ready,
                      abi::kAttrState | abi::kAttrAv | abi::kAttrPathMtu | abi::kAttrDestQpn |
                          abi::kAttrRqPsn | abi::kAttrMaxDestRdAtomic | abi::kAttrMinRnrTimer);
  if (error != 0) return InternalError(ErrnoMessage(where_ + ": queue pair to RTR", error));
  abi::QpAttr send = {};
  send.qp_state = abi::kQpRts;
  send.timeout = static_cast<uint8_t>(options_.timeout);
  send.retry_cnt = static_cast<uint8_t>(options_.retry_count);
  send.rnr_retry = (theirs.flags & kPagesOnDemand) != 0 ? kRnrWithoutEnd : kRnrRetries;
  send.sq_psn = mine.packet_number;
  send.max_rd_atomic = 1;
  error = verbs.modify_qp(qp_, &send,
                          abi::kAttrState | abi::kAttrTimeout | abi::kAttrRetryCount |
                              abi::kAttrRnrRetry | abi::kAttrSqPsn | abi::kAttrMaxRdAtomic);
  return error == 0 ? Status() : InternalError(ErrnoMessage(where_ + ": queue pair to RTS", error));
}

Status QueuePair::Post(const Write& write) {
  abi::Sge piece = {reinterpret_cast<uint64_t>(write.from), static_cast<uint32_t>(write.bytes),
                    write.lkey};
  abi::SendWr request = {};
  request.wr_id = posted_;
  request.sg_list = &piece;
  request.num_sge = write.bytes > 0 ? 1 : 0;
  request.opcode = write.has_immediate ? abi::kWrRdmaWriteWithImm : abi::kWrRdmaWrite;
  if (write.told) request.send_flags |= abi::kSendSignaled;
  if (write.bytes <= inline_bytes_) request.send_flags |= abi::kSendInline;
  request.imm_data = htonl(write.immediate);
  request.rdma.remote_addr = write.to;
  request.rdma.rkey = write.rkey;
  abi::SendWr* bad = nullptr;
  if (int error = device_->context()->ops.post_send(qp_, &request, &bad)) {
    return InternalError(ErrnoMessage(where_ + ": posting a write", error));
  }
  ++posted_;
  return Status();
}

Status QueuePair::PostReceives(uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    abi::RecvWr request = {};
    request.wr_id = kReceiveId;
    abi::RecvWr* bad = nullptr;
    if (int error = device_->context()->ops.post_recv(qp_, &request, &bad)) {
      return InternalError(ErrnoMessage(where_ + ": posting a receive", error));
    }
    ++receives_;
  }
  return Status();
}

// A write's completion stands for those before it that do not tell.
bool QueuePair::Count(const abi::Wc& wc, uint64_t* writes) {
  *writes = 0;
  if (wc.wr_id == kReceiveId) {
    --receives_;
    return true;
  }
  *writes = wc.wr_id + 1 - ended_;
  ended_ = wc.wr_id + 1;
  return false;
}

Status QueuePair::Poll(std::vector<Completion>* completions) {
  if (!error_.ok()) return error_;
  abi::Wc wcs[kPolled];
  int count = kPolled;
  while (count == kPolled) {
    count = device_->context()->ops.poll_cq(cq_, kPolled, wcs);
    if (count < 0) {
      error_ = InternalError(where_ + ": polling the completion queue failed");
      return error_;
    }
    for (int i = 0; i < count; ++i) {
      const abi::Wc& wc = wcs[i];
      uint64_t writes = 0;
      const bool receive = Count(wc, &writes);
      if (wc.status == abi::kWcSuccess) {
        completions->push_back({receive, receive ? ntohl(wc.imm_data) : 0, writes});
      } else if (error_.ok()) {
        // The first one tells the reason; it flushes the others.
        error_ = CompletionError(wc.status, wc.vendor_err, where_);
      }
    }
    if (!error_.ok()) return error_;
  }
  return Status();
}

Status QueuePair::Arm() {
  const int error = device_->context()->ops.req_notify_cq(cq_, 0);
  return error == 0 ? Status() : InternalError(ErrnoMessage(where_ + ": arming", error));
}

bool QueuePair::ReadEvent() {
  abi::Cq* cq = nullptr;
  void* unused = nullptr;
  if (device_->verbs().get_cq_event(channel_, &cq, &unused) != 0) return false;
  device_->verbs().ack_cq_events(cq_, 1);
  return true;
}

void QueuePair::Stop() {
  if (std::exchange(stopped_, true)) return;
  abi::QpAttr attr = {};
  attr.qp_state = abi::kQpError;
  (void)device_->verbs().modify_qp(qp_, &attr, abi::kAttrState);
}

bool QueuePair::Drained() {
  abi::Wc wcs[kPolled];
  int count = kPolled;
  while (count == kPolled) {
    count = device_->context()->ops.poll_cq(cq_, kPolled, wcs);
    uint64_t unused = 0;
    for (int i = 0; i < count; ++i) (void)Count(wcs[i], &unused);
  }
  return writes() == 0 && receives_ == 0;
}

}  // namespace hetccl::transport::rdma
