#include "xla_ffi/transport/rdma/device_slots.h"

#include <utility>

namespace hetccl::transport::rdma {
namespace {

// Registers the memory and says how; nothing if that is not possible, and why.
std::shared_ptr<Registration> Reach(Device* nic, std::byte* data, size_t bytes,
                                    const device::DmaBuf& dmabuf, int access, std::string* how) {
  std::shared_ptr<Registration> registration;
  std::string why_not = dmabuf.why_not;
  if (dmabuf.descriptor.valid()) {
    const Status status =
        nic->RegisterDmabuf(dmabuf.descriptor.get(), dmabuf.offset, bytes,
                            reinterpret_cast<uint64_t>(data), access, &registration);
    *how = "device memory: dma-buf";
    if (status.ok()) return registration;
    why_not = status.message();
  }
  const Status status = nic->Register(data, bytes, access, &registration);
  *how = "device memory: peer memory (dma-buf: " + why_not + ")";
  if (status.ok()) return registration;
  *how = "pinned host memory: this NIC cannot register device memory (dma-buf: " + why_not +
         "; peer memory: " + status.message() + ")";
  return nullptr;
}

}  // namespace

DeviceSlots MakeDeviceSlots(Device* nic, device::Space& space, device::Direction direction,
                            size_t bytes, int access) {
  DeviceSlots slots;
  if (space.addressable()) {
    slots.place = "host memory";
    return slots;
  }
  device::DmaBuf dmabuf;
  Status status = space.AllocateOnDevice(bytes, &slots.memory, &dmabuf);
  if (status.ok()) status = space.MakeDeviceCopier(direction, &slots.copier);
  if (!status.ok()) {
    slots = DeviceSlots();
    slots.place = "pinned host memory: " + status.message();
    return slots;
  }
  slots.registration = Reach(nic, slots.memory->data(), bytes, dmabuf, access, &slots.place);
  if (slots.registration == nullptr) {
    slots.copier.reset();
    slots.memory.reset();
  }
  return slots;
}

}  // namespace hetccl::transport::rdma
