// Which RDMA ports this machine has, and what is known of them.
#ifndef XLA_FFI_TRANSPORT_RDMA_DEVICES_H_
#define XLA_FFI_TRANSPORT_RDMA_DEVICES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "xla_ffi/common/status.h"

namespace hetccl::transport::rdma {

struct GidInfo {
  int index;
  std::string gid;     // eight groups of four hexadecimal digits
  std::string type;    // "IB", "RoCE v1", "RoCE v2"
  std::string netdev;  // empty where the entry has none
};

struct PortInfo {
  std::string name;  // of the device
  int port;
  std::string state;       // "ACTIVE", "DOWN", ...
  std::string link_layer;  // "InfiniBand", "Ethernet"
  std::string transport;   // "InfiniBand" (also RoCE), "iWARP": this transport needs the first
  int active_mtu;          // bytes
  double speed_gbps;       // 0: unknown
  int lid;
  std::vector<GidInfo> gids;
  int numa;         // -1: unknown
  std::string pci;  // "0000:3b:00.0"; empty for software devices
  bool dmabuf;      // the library can register memory by a dma-buf; whether the NIC can, shows then
};

// All ports of all devices that can be opened. An error if there is no libibverbs; no devices are
// none.
Status ListPorts(std::vector<PortInfo>* ports);

// "100 Gb/sec (4X EDR)", as the kernel prints a port's rate, in Gb/s; 0 if it is something else.
double ParseRate(const std::string& text);
// Whether a name is a PCI address, and not that of another bus.
bool IsPciAddress(const std::string& name);

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_DEVICES_H_
