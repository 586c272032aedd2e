// libcuda_twin.so: the cu* names of the test twin, those of the driver table. Not NVIDIA's driver.
#include <cstdint>
#include <vector>

#include "xla_ffi/device/twin/export.h"
#include "xla_ffi/device/twin/twin.h"

using hetccl::twin::Code;
using hetccl::twin::CurrentDevice;
using hetccl::twin::Exported;
using hetccl::twin::Handle;
using hetccl::twin::Needs;
using hetccl::twin::ThisThread;
using hetccl::twin::Twin;

namespace {

// Contexts are numbered like devices; a number that is no device is no context.
uintptr_t ContextOf(int device) { return 0xC0000 + static_cast<uintptr_t>(device) * 0x100; }
int DeviceOf(const Twin& twin, uintptr_t context) {
  for (int device = 0; device < twin.devices(); ++device) {
    if (ContextOf(device) == context) return device;
  }
  return -1;
}

}  // namespace

hetccl::twin::Personality hetccl::twin::ThisPersonality() {
  Personality personality;
  personality.version = 12080;
  personality.greatest_priority = -5;
  personality.same_addresses = 91;  // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
  personality.dma_buf = 124;        // DMA_BUF_SUPPORTED
  personality.attributes = {
      {98, 0},     // CAN_FLUSH_REMOTE_WRITES
      {116, 1},    // GPU_DIRECT_RDMA_SUPPORTED
      {117, 1},    // GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: on the host
      {118, 100},  // GPU_DIRECT_RDMA_WRITES_ORDERING: OWNER
      {124, 1},    // DMA_BUF_SUPPORTED
      {134, 0},    // HOST_NUMA_ID
  };
  return personality;
}

TWIN_EXPORT int cuInit(unsigned flags) {
  return Exported("cuInit", Needs::kNothing, [&](Twin& twin) -> int {
    if (flags != 0) return Code::kInvalidValue;
    if (twin.devices() == 0) return Code::kNoDevice;
    twin.initialised.store(true);
    return Code::kSuccess;
  });
}

TWIN_EXPORT int cuGetErrorName(int code, const char** name) {
  const auto* text = hetccl::twin::Find(code);
  *name = text == nullptr ? nullptr : text->cuda;
  return text == nullptr ? Code::kInvalidValue : Code::kSuccess;
}

TWIN_EXPORT int cuGetErrorString(int code, const char** string) {
  const auto* text = hetccl::twin::Find(code);
  *string = text == nullptr ? nullptr : text->text;
  return text == nullptr ? Code::kInvalidValue : Code::kSuccess;
}

TWIN_EXPORT int cuDevicePrimaryCtxRetain(uintptr_t* context, int device) {
  return Exported("cuDevicePrimaryCtxRetain", Needs::kInitialised, [&](Twin& twin) -> int {
    if (device < 0 || device >= twin.devices()) return Code::kInvalidDevice;
    *context = ContextOf(device);
    return Code::kSuccess;
  });
}

TWIN_EXPORT int cuCtxSetCurrent(uintptr_t context) {
  return Exported("cuCtxSetCurrent", Needs::kInitialised, [&](Twin& twin) -> int {
    std::vector<int>& contexts = ThisThread().contexts;
    const int device = DeviceOf(twin, context);
    if (context != 0 && device < 0) return Code::kInvalidContext;
    if (!contexts.empty()) contexts.pop_back();
    if (context != 0) contexts.push_back(device);
    return Code::kSuccess;
  });
}

TWIN_EXPORT int cuCtxPushCurrent_v2(uintptr_t context) {
  return Exported("cuCtxPushCurrent_v2", Needs::kInitialised, [&](Twin& twin) -> int {
    const int device = DeviceOf(twin, context);
    if (device < 0) return Code::kInvalidContext;
    ThisThread().contexts.push_back(device);
    return Code::kSuccess;
  });
}

TWIN_EXPORT int cuCtxPopCurrent_v2(uintptr_t* context) {
  return Exported("cuCtxPopCurrent_v2", Needs::kInitialised, [&](Twin&) -> int {
    std::vector<int>& contexts = ThisThread().contexts;
    if (contexts.empty()) return Code::kInvalidContext;
    if (context != nullptr) *context = ContextOf(contexts.back());
    contexts.pop_back();
    return Code::kSuccess;
  });
}

TWIN_EXPORT int cuCtxGetDevice(int* device) {
  return Exported("cuCtxGetDevice", Needs::kDevice, [&](Twin& twin) -> int {
    *device = CurrentDevice(twin);
    return Code::kSuccess;
  });
}

// Left out of libcuda_old_twin.so.
#ifndef TWIN_WITHOUT_OPTIONAL_SYMBOLS

TWIN_EXPORT int cuStreamWaitValue32_v2(Handle stream, uintptr_t address, uint32_t value,
                                       unsigned flags) {
  constexpr const char* kCall = "cuStreamWaitValue32_v2";
  return Exported(kCall, Needs::kDevice, [&](Twin& twin) {
    return hetccl::twin::MemoryOperations(twin, kCall, stream, {{true, address, value, flags}});
  });
}

TWIN_EXPORT int cuFlushGPUDirectRDMAWrites(int target, int scope) {
  return Exported("cuFlushGPUDirectRDMAWrites", Needs::kDevice, [&](Twin& twin) -> int {
    if (target != 0 || (scope != 100 && scope != 200)) return Code::kInvalidValue;
    return (AttributeOf(twin, 117).value_or(0) & 1) != 0 ? Code::kSuccess : Code::kNotSupported;
  });
}

#endif  // TWIN_WITHOUT_OPTIONAL_SYMBOLS
