// How a channel uses its NIC.
#ifndef XLA_FFI_TRANSPORT_RDMA_OPTIONS_H_
#define XLA_FFI_TRANSPORT_RDMA_OPTIONS_H_

#include <string>

#include "xla_ffi/common/clock.h"

namespace hetccl::transport::rdma {

struct Options {
  std::string device;  // "mlx5_0"
  int port = 1;
  int gid_index = 0;      // used on Ethernet, and on InfiniBand between subnets
  int traffic_class = 0;  // the IP header's 8 bits, DSCP and ECN
  // No defaults of their own: those of the settings are the only ones.
  int timeout = 0;       // until a packet is sent again: 4.096 us * 2^timeout, from 1 to 31
  int retry_count = -1;  // 0 to 7; software RoCE takes 7 for without end
  // Registrations of users' buffers are kept if the NIC follows the page tables.
  bool on_demand_paging = false;
  // For the peer's first message: it makes its memory before, on a GPU once no exchange holds the
  // device. Its death shows earlier, at the socket.
  Duration patience = std::chrono::seconds(60);
};

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_OPTIONS_H_
