// Slots in a GPU's memory that the NIC reaches.
#ifndef XLA_FFI_TRANSPORT_RDMA_DEVICE_SLOTS_H_
#define XLA_FFI_TRANSPORT_RDMA_DEVICE_SLOTS_H_

#include <cstddef>
#include <memory>
#include <string>

#include "xla_ffi/device/space.h"
#include "xla_ffi/transport/rdma/device.h"

namespace hetccl::transport::rdma {

struct DeviceSlots {
  std::unique_ptr<device::SlotMemory> memory;  // null: there are none
  std::shared_ptr<Registration> registration;
  std::unique_ptr<device::Copier> copier;
  // Where a channel's slots lie and why, for people, also where they lie on the host: "device
  // memory: dma-buf", "device memory: peer memory (dma-buf: ...)", "pinned host memory: ...".
  std::string place;
};

// Allocates `bytes` in the space's device and registers them with the NIC: by a dma-buf, else as
// peer memory, which vendors' kernel modules add. Not being able to is no error.
DeviceSlots MakeDeviceSlots(Device* nic, device::Space& space, device::Direction direction,
                            size_t bytes, int access);

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_DEVICE_SLOTS_H_
