#include "xla_ffi/bindings/transports.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include "xla_ffi/bindings/bindings.h"
#include "xla_ffi/transport/rdma/factory.h"
#include "xla_ffi/transport/shm/factory.h"
#include "xla_ffi/transport/tcp/factory.h"

namespace hetccl::bindings {

namespace nb = nanobind;

namespace {

// What a channel may need of the settings.
struct Settings {
  transport::Staging staging;
  transport::tcp::Options tcp;
  transport::rdma::Options rdma;
};

// What a transport's factory.h offers.
struct Factory {
  const char* name;
  Status (*make_sender)(std::vector<UniqueFd>, device::Space&, const Settings&,
                        std::unique_ptr<transport::Sender>*);
  Status (*make_receiver)(std::vector<UniqueFd>, device::Space&, const Settings&,
                          std::unique_ptr<transport::Receiver>*);
};

constexpr Factory kFactories[] = {
    {"rdma",
     [](std::vector<UniqueFd> fds, device::Space& space, const Settings& settings,
        std::unique_ptr<transport::Sender>* out) {
       return transport::rdma::MakeSender(std::move(fds), space, settings.staging, settings.rdma,
                                          out);
     },
     [](std::vector<UniqueFd> fds, device::Space& space, const Settings& settings,
        std::unique_ptr<transport::Receiver>* out) {
       return transport::rdma::MakeReceiver(std::move(fds), space, settings.staging, settings.rdma,
                                            out);
     }},
    {"shm",
     [](std::vector<UniqueFd> fds, device::Space& space, const Settings&,
        std::unique_ptr<transport::Sender>* out) {
       return transport::shm::MakeSender(std::move(fds), space, out);
     },
     [](std::vector<UniqueFd> fds, device::Space& space, const Settings&,
        std::unique_ptr<transport::Receiver>* out) {
       return transport::shm::MakeReceiver(std::move(fds), space, out);
     }},
    {"tcp",
     [](std::vector<UniqueFd> fds, device::Space& space, const Settings& settings,
        std::unique_ptr<transport::Sender>* out) {
       return transport::tcp::MakeSender(std::move(fds), space, settings.staging, settings.tcp,
                                         out);
     },
     [](std::vector<UniqueFd> fds, device::Space& space, const Settings& settings,
        std::unique_ptr<transport::Receiver>* out) {
       return transport::tcp::MakeReceiver(std::move(fds), space, settings.staging, settings.tcp,
                                           out);
     }},
};

nb::list RdmaDevices() {
  std::vector<transport::rdma::PortInfo> ports;
  Status status;
  {
    nb::gil_scoped_release release;  // asks every device's driver
    status = transport::rdma::ListPorts(&ports);
  }
  if (!status.ok()) throw std::runtime_error("hetccl: " + status.message());
  nb::list all;
  for (const transport::rdma::PortInfo& port : ports) {
    nb::list gids;
    for (const transport::rdma::GidInfo& gid : port.gids) {
      nb::dict entry;
      entry["index"] = gid.index;
      entry["gid"] = gid.gid;
      entry["type"] = gid.type;
      entry["netdev"] = gid.netdev;
      gids.append(entry);
    }
    nb::dict entry;
    entry["name"] = port.name;
    entry["port"] = port.port;
    entry["state"] = port.state;
    entry["link_layer"] = port.link_layer;
    entry["transport"] = port.transport;
    entry["active_mtu"] = port.active_mtu;
    entry["speed_gbps"] = port.speed_gbps;
    entry["lid"] = port.lid;
    entry["gids"] = gids;
    entry["numa"] = port.numa;
    entry["pci"] = port.pci;
    entry["dmabuf"] = port.dmabuf;
    all.append(entry);
  }
  return all;
}

}  // namespace

Status AddChannel(Engine& engine, uint32_t local_rank, uint32_t peer_rank, bool outgoing,
                  const std::string& transport, std::vector<UniqueFd> fds,
                  const transport::rdma::Options& rdma, std::vector<std::string> tls_keys) {
  device::Space& space = engine.SpaceOf(local_rank);
  const EngineOptions& options = engine.options();
  if (!tls_keys.empty() && transport != "tcp") {
    return InternalError("a channel over " + transport + " cannot be in TLS; over tcp it can");
  }
  Settings settings{{options.staging_slot_bytes, options.staging_slots}, {}, rdma};
  settings.tcp.checksum = options.checksum;
  settings.tcp.tls_keys = std::move(tls_keys);
  std::string known;
  for (const Factory& factory : kFactories) {
    known += known.empty() ? "" : ", ";
    known += factory.name;
    if (transport != factory.name) continue;
    if (outgoing) {
      std::unique_ptr<transport::Sender> sender;
      Status status = factory.make_sender(std::move(fds), space, settings, &sender);
      if (!status.ok()) return status;
      return engine.channels().AddOutgoing(local_rank, peer_rank, std::move(sender));
    }
    std::unique_ptr<transport::Receiver> receiver;
    Status status = factory.make_receiver(std::move(fds), space, settings, &receiver);
    if (!status.ok()) return status;
    return engine.channels().AddIncoming(local_rank, peer_rank, std::move(receiver));
  }
  return InternalError("unknown transport \"" + transport + "\"; known ones: " + known);
}

transport::rdma::Options RdmaOptions(const std::optional<nb::dict>& rdma) {
  transport::rdma::Options options;
  if (!rdma) return options;
  for (const auto& [key, value] : *rdma) {
    const auto name = nb::cast<std::string>(key);
    if (name == "device") {
      options.device = nb::cast<std::string>(value);
      continue;
    }
    if (name == "on_demand_paging") {
      options.on_demand_paging = nb::cast<bool>(value);
      continue;
    }
    const int number = nb::cast<int>(value);
    if (name == "port") {
      options.port = number;
    } else if (name == "gid_index") {
      options.gid_index = number;
    } else if (name == "traffic_class") {
      options.traffic_class = number;
    } else if (name == "timeout") {
      options.timeout = number;
    } else if (name == "retry_count") {
      options.retry_count = number;
    } else {
      throw std::runtime_error("hetccl: unknown option \"" + name + "\" of an rdma channel");
    }
  }
  return options;
}

void DefineTransports(nb::module_& module) {
  module.def(
      "make_shm_segment",
      [](uint32_t slot_bytes, uint32_t slots) {
        UniqueFd memfd;
        Status status = transport::shm::MakeSegment(slot_bytes, slots, &memfd);
        if (!status.ok()) throw std::runtime_error("hetccl: " + status.message());
        return std::vector<int>{memfd.release()};
      },
      nb::arg("slot_bytes") = transport::shm::kDefaultSlotBytes,
      nb::arg("slots") = transport::shm::kDefaultSlots);
  module.def("rdma_devices", &RdmaDevices);
  module.def("why_not_on_demand", [](const nb::dict& rdma) {
    const transport::rdma::Options options = RdmaOptions(rdma);
    nb::gil_scoped_release release;  // waits for the device
    return transport::rdma::WhyNotOnDemand(options);
  });
  module.def("tls_library", [] {
    std::string version;
    Status status = transport::tcp::FindTls(&version);
    if (!status.ok()) throw std::runtime_error("hetccl: " + status.message());
    return version;
  });
  module.def("kernel_tls_missing", [] { return transport::tcp::WhyNoTlsInKernel(); });
  module.attr("GPU_SLOT_BYTES") = transport::shm::kGpuSlotBytes;
  module.attr("GPU_SLOTS") = transport::shm::kGpuSlots;
}

}  // namespace hetccl::bindings
