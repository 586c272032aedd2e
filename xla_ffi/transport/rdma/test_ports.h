// Two RDMA ports that reach each other, for tests that need them.
#ifndef XLA_FFI_TRANSPORT_RDMA_TEST_PORTS_H_
#define XLA_FFI_TRANSPORT_RDMA_TEST_PORTS_H_

#include <string>
#include <vector>

#include "xla_ffi/transport/rdma/devices.h"
#include "xla_ffi/transport/rdma/options.h"

namespace hetccl::transport::rdma {

// The first two active ports, or one that is connected with itself, with the GID of an IPv4
// address. None: *why_not says why.
inline std::vector<Options> TestPorts(std::string* why_not) {
  std::vector<PortInfo> ports;
  const Status status = ListPorts(&ports);
  std::vector<Options> found;
  for (const PortInfo& port : ports) {
    if (port.state != "ACTIVE" || port.transport != "InfiniBand" || found.size() == 2) continue;
    Options options;
    options.device = port.name;
    options.port = port.port;
    options.timeout = 14;
    options.retry_count = 3;
    for (const GidInfo& gid : port.gids) {
      const bool ipv4 = gid.gid.rfind("0000:0000:0000:0000:0000:ffff:", 0) == 0;
      if (gid.type == "RoCE v2" && ipv4) options.gid_index = gid.index;
    }
    found.push_back(options);
  }
  *why_not = status.ok() ? "no InfiniBand or RoCE port is active" : status.message();
  if (found.size() == 1) found.push_back(found[0]);
  return found;
}

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_TEST_PORTS_H_
