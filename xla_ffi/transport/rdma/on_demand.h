// Whether a NIC follows the page tables (on-demand paging, ODP).
#ifndef XLA_FFI_TRANSPORT_RDMA_ON_DEMAND_H_
#define XLA_FFI_TRANSPORT_RDMA_ON_DEMAND_H_

#include <memory>
#include <string>

#include "xla_ffi/transport/rdma/device.h"
#include "xla_ffi/transport/rdma/options.h"

namespace hetccl::transport::rdma {

// Why registrations with abi::kAccessOnDemand are not to be relied on with this device; empty if
// they are. Asks for its capabilities and, if they say yes, writes by RDMA within this process,
// through the port of `options`, and again after the memory was mapped anew: a driver may say yes
// and put bytes elsewhere (software RoCE does, up to Linux 7.2 at least, where a packet does not
// begin at a page). Waits, for seconds at most.
std::string TryOnDemand(const std::shared_ptr<Device>& device, const Options& options);

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_ON_DEMAND_H_
