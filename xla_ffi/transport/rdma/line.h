// What both ends of an RDMA channel consist of: a queue pair, and the stream socket beside it.
#ifndef XLA_FFI_TRANSPORT_RDMA_LINE_H_
#define XLA_FFI_TRANSPORT_RDMA_LINE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/common/fd.h"
#include "xla_ffi/common/status.h"
#include "xla_ffi/transport/link.h"
#include "xla_ffi/transport/rdma/device.h"
#include "xla_ffi/transport/rdma/options.h"
#include "xla_ffi/transport/rdma/queue_pair.h"
#include "xla_ffi/transport/rdma/wire.h"
#include "xla_ffi/transport/transport.h"

namespace hetccl::transport::rdma {

// Used by one thread at a time.
class Line {
 public:
  Line(UniqueFd socket, const Options& options) : options_(options), link_(std::move(socket)) {}

  // Opens the device and makes the queue pair with its receives; the rest of the record is the
  // caller's to fill.
  Status Open(const QueuePair::Depths& depths, EndpointRecord* mine);
  // Comes together with the peer. Waits.
  Status Meet(const EndpointRecord& mine, const void* probe, uint32_t probe_lkey);
  // Tells the peer that this side cannot, before Meet.
  void Refuse(Role role, const Status& status);

  const std::shared_ptr<Device>& device() const { return device_; }
  QueuePair& queue_pair() { return *queue_pair_; }
  const QueuePair& queue_pair() const { return *queue_pair_; }
  // Nothing moves any more, in an error.
  bool failed() const { return queue_pair_->failed(); }
  const EndpointRecord& theirs() const { return theirs_; }
  Link& link() { return link_; }
  const Link& link() const { return link_; }
  std::vector<int> poll_fds() const { return {link_.fd(), queue_pair_->fd()}; }
  void OnReady();

  // What has ended since the last call; each receive is posted anew. No error if the peer is gone
  // anyway: link() tells.
  Status Poll(std::vector<Completion>* completions);
  // Gives up, in several calls: true once the NIC touches nothing of this channel any more.
  bool Quiet();
  // Takes the queue pair away from the NIC, before the memory that it knows. Idempotent.
  void Close() { queue_pair_.reset(); }

  // Slots that both sides know of.
  uint64_t slots() const { return slots_; }
  // abi::kAccessOnDemand if users' memory is to be registered with it, else 0. After Open.
  int paging() const { return paging_; }
  // `direct`: whether users' memory is registered, and not only the slots.
  Route RouteWith(std::string slots, bool direct, uint64_t copied) const;

 private:
  const Options options_;
  Link link_;
  std::shared_ptr<Device> device_;
  std::unique_ptr<QueuePair> queue_pair_;
  EndpointRecord theirs_;
  uint64_t slots_ = 0;
  int paging_ = 0;
  std::string why_not_on_demand_;  // if it is wanted
  std::optional<TimePoint> stopped_;
};

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_LINE_H_
