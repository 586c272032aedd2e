#include "xla_ffi/transport/rdma/line.h"

#include <algorithm>
#include <utility>

#include "xla_ffi/transport/rdma/handshake.h"
#include "xla_ffi/transport/rdma/on_demand.h"

namespace hetccl::transport::rdma {
namespace {

// A NIC that works ends what was flushed within milliseconds. Whatever one does that does not,
// taking the registration away ends it.
constexpr auto kDrainBound = std::chrono::seconds(2);

}  // namespace

Status Line::Open(const QueuePair::Depths& depths, EndpointRecord* mine) {
  if (Status status = Device::Open(options_.device, &device_); !status.ok()) return status;
  if (options_.on_demand_paging) {
    why_not_on_demand_ = device_->WhyNotOnDemand([this] { return TryOnDemand(device_, options_); });
    if (why_not_on_demand_.empty()) paging_ = abi::kAccessOnDemand;
  }
  mine->record_bytes = sizeof(EndpointRecord);
  Status status = QueuePair::Make(device_, options_, depths, mine, &queue_pair_);
  if (!status.ok()) return status;
  return queue_pair_->PostReceives(depths.receives);
}

Status Line::Meet(const EndpointRecord& mine, const void* probe, uint32_t probe_lkey) {
  Status status =
      Handshake(link_.fd(), options_, queue_pair_.get(), mine, probe, probe_lkey, &theirs_);
  slots_ = std::min(mine.slots, theirs_.slots);
  return status;
}

void Line::Refuse(Role role, const Status& status) {
  rdma::Refuse(link_.fd(), options_, role, status.message());
}

void Line::OnReady() {
  // Either descriptor may be the ready one, and each tells it only once.
  while (queue_pair_->ReadEvent()) {
  }
  link_.Read();
}

Status Line::Poll(std::vector<Completion>* completions) {
  completions->clear();
  Status status = queue_pair_->Poll(completions);
  if (!status.ok()) {
    link_.Read();
    return link_.peer() == PeerState::kAlive ? status : Status();
  }
  uint32_t receives = 0;
  for (const Completion& completion : *completions) receives += completion.receive ? 1 : 0;
  return receives > 0 ? queue_pair_->PostReceives(receives) : Status();
}

bool Line::Quiet() {
  queue_pair_->Stop();
  if (!stopped_) stopped_ = Clock::now();
  return queue_pair_->Drained() || Clock::now() - *stopped_ > kDrainBound;
}

Route Line::RouteWith(std::string slots, bool direct, uint64_t copied) const {
  if (direct && paging_ != 0) {
    slots += "; registrations of buffers are kept";
  } else if (direct && options_.on_demand_paging) {
    slots += "; buffers are registered for each exchange: " + why_not_on_demand_;
  }
  return {options_.device, options_.port, std::move(slots), copied, device_->registrations()};
}

}  // namespace hetccl::transport::rdma
