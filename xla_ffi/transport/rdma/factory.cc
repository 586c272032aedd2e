#include "xla_ffi/transport/rdma/factory.h"

#include <cerrno>
#include <utility>

#include "xla_ffi/transport/rdma/on_demand.h"
#include "xla_ffi/transport/rdma/receiver.h"
#include "xla_ffi/transport/rdma/sender.h"

namespace hetccl::transport::rdma {
namespace {

Status CheckOptions(const Options& options) {
  if (options.device.size() >= sizeof(abi::Device::name) || options.device.empty()) {
    return InternalError("an RDMA channel needs the name of a device");
  }
  if (options.port < 1 || options.port > 254 || options.gid_index < 0 || options.gid_index > 255 ||
      options.traffic_class < 0 || options.traffic_class > 255 || options.timeout < 1 ||
      options.timeout > 31 || options.retry_count < 0 || options.retry_count > 7) {
    return InternalError(
        "an RDMA channel needs a port of 1 to 254, a GID index and a traffic class of 0 to 255, a "
        "timeout of 1 to 31 and a retry count of 0 to 7");
  }
  return Status();
}

template <typename Half, typename Interface>
Status Make(std::vector<UniqueFd> sockets, device::Space& space, const Staging& staging,
            const Options& options, std::unique_ptr<Interface>* out) {
  if (sockets.size() != 1) {
    return InternalError("an RDMA channel needs one stream socket, got " +
                         std::to_string(sockets.size()) + " descriptors");
  }
  if (Status status = CheckOptions(options); !status.ok()) return status;
  if (!SensibleSlots(staging.slot_bytes, staging.slots)) {
    return InternalError(
        "an RDMA channel needs slots of 4 KB to 64 MB in multiples of 64 bytes, and 2 to 1024 of "
        "them");
  }
  if (!SetNonBlocking(sockets[0].get())) {
    return InternalError(ErrnoMessage("an RDMA channel's socket", errno));
  }
  auto half = std::make_unique<Half>(std::move(sockets[0]), options);
  if (Status status = half->Open(space, staging); !status.ok()) return status;
  *out = std::move(half);
  return Status();
}

}  // namespace

Status MakeSender(std::vector<UniqueFd> sockets, device::Space& space, const Staging& staging,
                  const Options& options, std::unique_ptr<Sender>* out) {
  return Make<RdmaSender>(std::move(sockets), space, staging, options, out);
}

Status MakeReceiver(std::vector<UniqueFd> sockets, device::Space& space, const Staging& staging,
                    const Options& options, std::unique_ptr<Receiver>* out) {
  return Make<RdmaReceiver>(std::move(sockets), space, staging, options, out);
}

std::string WhyNotOnDemand(const Options& options) {
  std::shared_ptr<Device> device;
  if (Status status = Device::Open(options.device, &device); !status.ok()) return status.message();
  return device->WhyNotOnDemand([&] { return TryOnDemand(device, options); });
}

}  // namespace hetccl::transport::rdma
