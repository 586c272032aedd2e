// Memory of a device and of the host, and GPUDirect.
#include "xla_ffi/device/driver/abi.h"
#include "xla_ffi/device/driver/gpu.h"
#include "xla_ffi/device/driver/gpu_call.h"

namespace hetccl::device {

Status Gpu::MemAlloc(size_t bytes, void** device) const {
  return Call(driver_.table().MemAlloc, device, bytes);
}
Status Gpu::MemFree(void* device) const { return Call(driver_.table().MemFree, device); }
Status Gpu::MemHostAlloc(size_t bytes, void** host) const {
  return Call(driver_.table().MemHostAlloc, host, bytes,
              vendor() == Vendor::kCuda ? abi::kCudaHostAlloc : abi::kHipHostAlloc);
}
Status Gpu::MemFreeHost(void* host) const { return Call(driver_.table().MemFreeHost, host); }
Status Gpu::MemHostRegister(void* host, size_t bytes) const {
  return Call(driver_.table().MemHostRegister, host, bytes, abi::kHostRegister);
}
Status Gpu::MemHostUnregister(void* host) const {
  return Call(driver_.table().MemHostUnregister, host);
}
Status Gpu::MemHostGetDevicePointer(void* host, void** device) const {
  return Call(driver_.table().MemHostGetDevicePointer, device, host, 0u);
}

Status Gpu::SignalAlloc(Signal* signal) const {
  const Table& table = driver_.table();
  void* host = nullptr;
  void* device = nullptr;
  if (vendor() == Vendor::kHip) {
    Status status = Call(table.MallocWithFlags, &host, static_cast<size_t>(abi::kHipSignalBytes),
                         abi::kHipMallocSignalMemory);
    if (!status.ok()) return status;
    device = host;
  } else {
    if (Status status = MemHostAlloc(sizeof(uint64_t), &host); !status.ok()) return status;
    if (Status status = MemHostGetDevicePointer(host, &device); !status.ok()) {
      (void)MemFreeHost(host);
      return status;
    }
  }
  __atomic_store_n(static_cast<uint64_t*>(host), 0, __ATOMIC_RELEASE);
  *signal = Signal{static_cast<uint32_t*>(host), device};
  return Status();
}

Status Gpu::ExportDmaBuf(const void* device, size_t bytes, int* descriptor,
                         uint64_t* offset) const {
  const Table& table = driver_.table();
  *offset = 0;
  if (table.MemGetHandleForAddressRange || !table.ExportDmaBuf) {
    return Call(table.MemGetHandleForAddressRange, static_cast<void*>(descriptor), device, bytes,
                abi::kDmaBufDescriptor, 0ull);
  }
  // Codes of HSA, whose names HIP does not know.
  const int code = table.ExportDmaBuf.call(device, bytes, descriptor, offset);
  if (code == 0) return Status();
  return InternalError(std::string(table.ExportDmaBuf.name) + " failed on " + Label() +
                       ": hsa_status_t " + std::to_string(code));
}

Status Gpu::FlushRemoteWrites() const {
  return Call(driver_.table().FlushGPUDirectRDMAWrites, abi::kCudaFlushCurrentContext,
              abi::kCudaFlushToOwner);
}

}  // namespace hetccl::device
