// Opening a device: its context, its names and what it can do.
#include <array>
#include <optional>

#include "xla_ffi/device/driver/abi.h"
#include "xla_ffi/device/driver/gpu.h"
#include "xla_ffi/device/driver/gpu_call.h"

namespace hetccl::device {

Status Gpu::Initialise() {
  const Table& table = driver_.table();
  if (Status status = Call(table.DeviceGet, &device_, ordinal_); !status.ok()) return status;
  std::array<char, 256> text{};
  if (Status status =
          Call(table.DeviceGetName, text.data(), static_cast<int>(text.size()) - 1, device_);
      !status.ok()) {
    return status;
  }
  name_ = text.data();
  text.fill('\0');
  if (Status status =
          Call(table.DeviceGetPCIBusId, text.data(), static_cast<int>(text.size()) - 1, device_);
      !status.ok()) {
    return status;
  }
  pci_bus_id_ = text.data();
  if (vendor() == Vendor::kCuda) {
    Status status = Call(table.DevicePrimaryCtxRetain, &context_, device_);
    if (!status.ok()) return status;
  }
  QueryCapabilities();
  const ScopedCurrent current(*this);
  if (!current.status().ok()) return current.status();
  int least = 0;
  return Call(table.GetStreamPriorityRange, &least, &high_priority_);
}

std::optional<int> Gpu::Attribute(int cuda, int hip) const {
  const int attribute = vendor() == Vendor::kCuda ? cuda : hip;
  int value = 0;
  // Older drivers do not know newer attributes: not an error, an unknown.
  if (attribute < 0 || !Call(driver_.table().DeviceGetAttribute, &value, attribute, device_).ok()) {
    return std::nullopt;
  }
  return value;
}

void Gpu::QueryCapabilities() {
  const Table& table = driver_.table();
  const bool cuda = vendor() == Vendor::kCuda;
  const auto attribute = [this](abi::Attribute a) { return Attribute(a.cuda, a.hip); };
  Capabilities& can = capabilities_;
  can.missing = table.missing;
  can.stream_memory_operations =
      table.StreamWriteValue32 &&
      (cuda ? bool(table.StreamWaitValue32)
            : table.StreamWaitValue32Masked && attribute(abi::kCanWaitOnValue).value_or(0) != 0);
  can.waits_on_registered_memory = cuda && can.stream_memory_operations;
  can.wait_flushes_remote_writes =
      can.stream_memory_operations && attribute(abi::kCanFlushRemoteWrites).value_or(0) != 0;
  can.host_functions = bool(table.LaunchHostFunc);
  can.same_host_addresses = attribute(abi::kSameHostAddresses).value_or(0) != 0;
  // ROCm has the function longer than the attribute.
  can.dma_buf = (table.MemGetHandleForAddressRange || table.ExportDmaBuf) &&
                attribute(abi::kDmaBuf).value_or(cuda ? 0 : 1) != 0;
  can.gpu_direct_rdma = cuda ? attribute(abi::kGpuDirectRdma).value_or(0) != 0 : can.dma_buf;
  can.writes_ordering = static_cast<WritesOrdering>(attribute(abi::kWritesOrdering).value_or(0));
  can.host_flush = table.FlushGPUDirectRDMAWrites &&
                   (attribute(abi::kFlushOptions).value_or(0) & abi::kCudaFlushOptionHost) != 0;
  can.host_numa_node = attribute(abi::kHostNumaNode).value_or(-1);
}

}  // namespace hetccl::device
