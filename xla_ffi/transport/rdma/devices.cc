#include "xla_ffi/transport/rdma/devices.h"

#include <net/if.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "xla_ffi/transport/rdma/verbs.h"

namespace hetccl::transport::rdma {
namespace {

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string PciAddress(const std::string& sysfs) {
  char resolved[PATH_MAX];
  if (::realpath((sysfs + "/device").c_str(), resolved) == nullptr) return "";
  const std::string path = resolved;
  const std::string last = path.substr(path.rfind('/') + 1);
  return IsPciAddress(last) ? last : "";
}

int NumaNode(const std::string& sysfs) {
  const std::string text = FirstLine(sysfs + "/device/numa_node");
  return text.empty() ? -1 : std::atoi(text.c_str());
}

std::string StateName(int state) {
  switch (state) {
    case abi::kPortDown:
      return "DOWN";
    case abi::kPortInit:
      return "INIT";
    case abi::kPortArmed:
      return "ARMED";
    case abi::kPortActive:
      return "ACTIVE";
    default:
      return "UNKNOWN";
  }
}

std::string GidTypeName(uint32_t type) {
  switch (type) {
    case abi::kGidRoceV1:
      return "RoCE v1";
    case abi::kGidRoceV2:
      return "RoCE v2";
    default:
      return "IB";
  }
}

std::string GidText(const abi::Gid& gid) {
  std::string text;
  for (int i = 0; i < 16; i += 2) {
    char group[8];
    std::snprintf(group, sizeof(group), "%s%02x%02x", i > 0 ? ":" : "", gid.raw[i], gid.raw[i + 1]);
    text += group;
  }
  return text;
}

std::string NetdevName(uint32_t index) {
  char name[IF_NAMESIZE] = {};
  return index != 0 && ::if_indextoname(index, name) != nullptr ? name : "";
}

std::vector<abi::GidEntry> GidTable(const Verbs& verbs, abi::Context* context, size_t length) {
  // The kernel's interface takes no answer of more than 64 KB.
  std::vector<abi::GidEntry> entries(std::min<size_t>(length, 2000));
  const ssize_t count = length == 0 ? 0
                                    : verbs.query_gid_table(context, entries.data(), entries.size(),
                                                            0, sizeof(entries[0]));
  entries.resize(count > 0 ? static_cast<size_t>(count) : 0);
  return entries;
}

void AddPorts(const Verbs& verbs, const abi::Device& device, abi::Context* context,
              std::vector<PortInfo>* ports) {
  const std::string sysfs = std::string("/sys/class/infiniband/") + device.name;
  std::vector<abi::PortAttr> attributes;
  size_t gids = 0;
  // Ports count from 1; the first that is not there ends the list.
  for (uint8_t port = 1; port < 255; ++port) {
    abi::PortAttr attr = {};
    if (verbs.query_port(context, port, &attr) != 0) break;
    attributes.push_back(attr);
    gids += static_cast<size_t>(attr.gid_tbl_len);
  }
  const std::vector<abi::GidEntry> table = GidTable(verbs, context, gids);
  for (size_t i = 0; i < attributes.size(); ++i) {
    const abi::PortAttr& attr = attributes[i];
    PortInfo info;
    info.name = device.name;
    info.port = static_cast<int>(i) + 1;
    info.state = StateName(attr.state);
    info.link_layer = attr.link_layer == abi::kLinkEthernet ? "Ethernet" : "InfiniBand";
    info.transport = device.transport_type == abi::kTransportIb      ? "InfiniBand"
                     : device.transport_type == abi::kTransportIwarp ? "iWARP"
                                                                     : "other";
    info.active_mtu = 128 << attr.active_mtu;
    info.speed_gbps = ParseRate(FirstLine(sysfs + "/ports/" + std::to_string(info.port) + "/rate"));
    info.lid = attr.lid;
    for (const abi::GidEntry& entry : table) {
      if (entry.port_num != static_cast<uint32_t>(info.port)) continue;
      info.gids.push_back({static_cast<int>(entry.gid_index), GidText(entry.gid),
                           GidTypeName(entry.gid_type), NetdevName(entry.ndev_ifindex)});
    }
    info.numa = NumaNode(sysfs);
    info.pci = PciAddress(sysfs);
    info.dmabuf = verbs.reg_dmabuf_mr != nullptr;
    ports->push_back(std::move(info));
  }
}

}  // namespace

double ParseRate(const std::string& text) {
  double rate = 0;
  char unit[8] = {};
  if (std::sscanf(text.c_str(), "%lf %7s", &rate, unit) != 2) return 0;
  return std::string(unit) == "Gb/sec" ? rate : 0;
}

bool IsPciAddress(const std::string& name) {
  unsigned domain, bus, slot, function;
  int used = 0;
  return std::sscanf(name.c_str(), "%x:%2x:%2x.%1x%n", &domain, &bus, &slot, &function, &used) ==
             4 &&
         static_cast<size_t>(used) == name.size();
}

Status ListPorts(std::vector<PortInfo>* ports) {
  ports->clear();
  const Verbs* verbs = nullptr;
  if (Status status = LoadVerbs(&verbs); !status.ok()) return status;
  int count = 0;
  errno = 0;
  abi::Device** list = verbs->get_device_list(&count);
  if (list == nullptr) {
    // A kernel without the uverbs driver.
    if (errno == ENOSYS || errno == 0) return Status();
    return InternalError(ErrnoMessage("listing RDMA devices", errno));
  }
  for (int i = 0; i < count; ++i) {
    abi::Context* context = verbs->open_device(list[i]);
    if (context == nullptr) continue;  // not given to this container
    AddPorts(*verbs, *list[i], context, ports);
    verbs->close_device(context);
  }
  verbs->free_device_list(list);
  return Status();
}

}  // namespace hetccl::transport::rdma
