#include "xla_ffi/device/driver/gpu.h"

#include "xla_ffi/device/driver/abi.h"
#include "xla_ffi/device/driver/gpu_call.h"

namespace hetccl::device {

Status Gpu::Failed(const char* call, int code) const {
  Forget();
  return InternalError(std::string(call) + " failed on " + Label() + ": " + driver_.Describe(code));
}

Status Gpu::Lacks(const char* symbol) const {
  return InternalError(Label() + " cannot do this: " + driver_.table().library + " lacks " +
                       (symbol != nullptr ? symbol : "any function for it"));
}

std::string Gpu::Label() const {
  std::string label = std::string(PlatformName(vendor())) + " device " + std::to_string(ordinal_);
  if (!name_.empty()) label += " (" + name_ + ", " + pci_bus_id_ + ")";
  return label;
}

void Gpu::Forget() const {
  // HIP hands the code out a second time, to whoever asks this thread for its last error.
  const auto& last_error = driver_.table().GetLastError;
  if (last_error) (void)last_error.call();
}

Status Gpu::MakeCurrent() const {
  const Table& table = driver_.table();
  return vendor() == Vendor::kCuda ? Call(table.CtxSetCurrent, context_)
                                   : Call(table.SetDevice, ordinal_);
}

ScopedCurrent::ScopedCurrent(const Gpu& gpu) : gpu_(gpu) {
  const Table& table = gpu.driver_.table();
  if (gpu.vendor() == Vendor::kCuda) {
    status_ = gpu.Call(table.CtxPushCurrent, gpu.context_);
    return;
  }
  status_ = gpu.Call(table.CurrentDevice, &before_);
  if (status_.ok() && before_ != gpu.ordinal_) status_ = gpu.Call(table.SetDevice, gpu.ordinal_);
}

ScopedCurrent::~ScopedCurrent() {
  if (!status_.ok()) return;
  const Table& table = gpu_.driver_.table();
  // A failure here leaves another device current, which the next call of its owner reports.
  if (gpu_.vendor() == Vendor::kCuda) {
    Context popped = nullptr;
    (void)table.CtxPopCurrent.call(&popped);
  } else if (before_ != gpu_.ordinal_) {
    (void)table.SetDevice.call(before_);
  }
}

// --- Streams and events. ---

Status Gpu::StreamCreate(bool high_priority, Stream* stream) const {
  return Call(driver_.table().StreamCreateWithPriority, stream, abi::kStreamNonBlocking,
              high_priority ? high_priority_ : 0);
}
Status Gpu::StreamDestroy(Stream stream) const {
  return Call(driver_.table().StreamDestroy, stream);
}
Status Gpu::StreamQuery(Stream stream, bool* done) const {
  return Ask(driver_.table().StreamQuery, done, stream);
}
Status Gpu::StreamSynchronize(Stream stream) const {
  return Call(driver_.table().StreamSynchronize, stream);
}
Status Gpu::EventCreate(Event* event) const {
  return Call(driver_.table().EventCreate, event, abi::kEventDisableTiming);
}
Status Gpu::EventRecord(Event event, Stream stream) const {
  return Call(driver_.table().EventRecord, event, stream);
}
Status Gpu::EventQuery(Event event, bool* done) const {
  return Ask(driver_.table().EventQuery, done, event);
}

// --- Copies and fills. ---

Status Gpu::MemcpyDtoHAsync(void* host, const void* device, size_t bytes, Stream stream) const {
  return Call(driver_.table().MemcpyDtoHAsync, host, device, bytes, stream);
}
Status Gpu::MemcpyHtoDAsync(void* device, const void* host, size_t bytes, Stream stream) const {
  return Call(driver_.table().MemcpyHtoDAsync, device, host, bytes, stream);
}
Status Gpu::MemcpyDtoDAsync(void* to, const void* from, size_t bytes, Stream stream) const {
  return Call(driver_.table().MemcpyDtoDAsync, to, from, bytes, stream);
}
Status Gpu::MemsetD8Async(void* device, uint8_t value, size_t bytes, Stream stream) const {
  return Call(driver_.table().MemsetD8Async, device, value, bytes, stream);
}
Status Gpu::MemsetD32Async(void* device, uint32_t value, size_t words, Stream stream) const {
  return Call(driver_.table().MemsetD32Async, device, value, words, stream);
}

// --- Stream memory operations and host functions. ---

Status Gpu::StreamWaitValue32(Stream stream, void* address, uint32_t value, Compare compare,
                              bool flush) const {
  const Table& table = driver_.table();
  unsigned flags = compare == Compare::kEqual ? abi::kWaitEqual : abi::kWaitAtLeast;
  if (vendor() == Vendor::kHip) {
    if (flush) return Lacks(nullptr);
    return Call(table.StreamWaitValue32Masked, stream, address, value, flags, abi::kHipWaitMask);
  }
  if (flush) flags |= abi::kCudaWaitFlush;
  return Call(table.StreamWaitValue32, stream, address, value, flags);
}

Status Gpu::StreamWriteValue32(Stream stream, void* address, uint32_t value) const {
  return Call(driver_.table().StreamWriteValue32, stream, address, value, abi::kWriteDefault);
}

Status Gpu::LaunchHostFunc(Stream stream, HostFunction function, void* data) const {
  return Call(driver_.table().LaunchHostFunc, stream, function, data);
}

}  // namespace hetccl::device
