// What both libraries of the test twin export, under the one's names or the other's.
#include <cstddef>
#include <cstdint>
#include <optional>

#include "xla_ffi/device/twin/export.h"
#include "xla_ffi/device/twin/twin.h"

namespace hetccl::twin {

TWIN_EXPORT int TWIN_NAME(cuDriverGetVersion, hipDriverGetVersion)(int* version) {
  return Exported(__func__, Needs::kNothing, [&](Twin& twin) -> int {
    *version = static_cast<int>(twin.settings.Number("driver_version"));
    return Code::kSuccess;
  });
}

// --- Devices. ---

TWIN_EXPORT int TWIN_NAME(cuDeviceGetCount, hipGetDeviceCount)(int* count) {
  return Exported(__func__, Needs::kInitialised, [&](Twin& twin) -> int {
    *count = twin.devices();
    return Code::kSuccess;
  });
}

TWIN_EXPORT int TWIN_NAME(cuDeviceGet, hipDeviceGet)(int* device, int ordinal) {
  return Exported(__func__, Needs::kInitialised, [&](Twin& twin) -> int {
    if (ordinal < 0 || ordinal >= twin.devices()) return Code::kInvalidDevice;
    *device = ordinal;
    return Code::kSuccess;
  });
}

TWIN_EXPORT int TWIN_NAME(cuDeviceGetAttribute, hipDeviceGetAttribute)(int* value, int attribute,
                                                                       int device) {
  return Exported(__func__, Needs::kInitialised, [&](Twin& twin) -> int {
    if (device < 0 || device >= twin.devices()) return Code::kInvalidDevice;
    const std::optional<int> known = AttributeOf(twin, attribute);
    *value = known.value_or(0);
    return known ? Code::kSuccess : Code::kInvalidValue;
  });
}

TWIN_EXPORT int TWIN_NAME(cuDeviceGetName, hipDeviceGetName)(char* name, int length, int device) {
  return Exported(__func__, Needs::kInitialised,
                  [&](Twin& twin) { return Name(twin, name, length, device); });
}

TWIN_EXPORT int TWIN_NAME(cuDeviceGetPCIBusId, hipDeviceGetPCIBusId)(char* id, int length,
                                                                     int device) {
  return Exported(__func__, Needs::kInitialised,
                  [&](Twin& twin) { return PciBusId(twin, id, length, device); });
}

// --- Streams and events. ---

TWIN_EXPORT int TWIN_NAME(cuCtxGetStreamPriorityRange,
                          hipDeviceGetStreamPriorityRange)(int* least, int* greatest) {
  return Exported(__func__, Needs::kDevice, [&](Twin& twin) -> int {
    *least = twin.is.least_priority;
    *greatest = twin.is.greatest_priority;
    return Code::kSuccess;
  });
}

TWIN_EXPORT int TWIN_NAME(cuStreamCreateWithPriority,
                          hipStreamCreateWithPriority)(Handle* stream, unsigned flags, int) {
  return Exported(__func__, Needs::kDevice, [&](Twin& twin) -> int {
    // Streams that synchronise with the legacy default stream: ours never do, the twin has none.
    if (stream == nullptr || flags != 1) return Code::kInvalidValue;
    return twin.scheduler.CreateStream(CurrentDevice(twin), stream);
  });
}

TWIN_EXPORT int TWIN_NAME(cuStreamDestroy_v2, hipStreamDestroy)(Handle stream) {
  return Exported(__func__, Needs::kDevice,
                  [&](Twin& twin) { return twin.scheduler.DestroyStream(stream); });
}

TWIN_EXPORT int TWIN_NAME(cuStreamQuery, hipStreamQuery)(Handle stream) {
  return Exported(__func__, Needs::kDevice, [&](Twin& twin) {
    return twin.scheduler.QueryStream(stream, CurrentDevice(twin));
  });
}

TWIN_EXPORT int TWIN_NAME(cuStreamSynchronize, hipStreamSynchronize)(Handle stream) {
  return Exported(__func__, Needs::kDevice, [&](Twin& twin) {
    return twin.scheduler.SynchronizeStream(stream, CurrentDevice(twin));
  });
}

TWIN_EXPORT int TWIN_NAME(cuEventCreate, hipEventCreateWithFlags)(Handle* event, unsigned flags) {
  return Exported(__func__, Needs::kDevice, [&](Twin& twin) -> int {
    if (event == nullptr || flags > 7) return Code::kInvalidValue;
    return twin.scheduler.CreateEvent(CurrentDevice(twin), event);
  });
}

TWIN_EXPORT int TWIN_NAME(cuEventRecord, hipEventRecord)(Handle event, Handle stream) {
  const char* const call = __func__;
  return Exported(call, Needs::kDevice, [&](Twin& twin) {
    return twin.scheduler.RecordEvent(call, event, stream, CurrentDevice(twin));
  });
}

TWIN_EXPORT int TWIN_NAME(cuEventQuery, hipEventQuery)(Handle event) {
  return Exported(__func__, Needs::kDevice,
                  [&](Twin& twin) { return twin.scheduler.QueryEvent(event); });
}

// --- Copies and memory. ---

TWIN_EXPORT int TWIN_NAME(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync)(void* to, const void* from,
                                                                    size_t bytes, Handle stream) {
  const char* const call = __func__;
  return Exported(call, Needs::kDevice, [&](Twin& twin) {
    return Copy(twin, call, to, from, bytes, stream, Direction::kToHost);
  });
}

TWIN_EXPORT int TWIN_NAME(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync)(void* to, const void* from,
                                                                    size_t bytes, Handle stream) {
  const char* const call = __func__;
  return Exported(call, Needs::kDevice, [&](Twin& twin) {
    return Copy(twin, call, to, from, bytes, stream, Direction::kToDevice);
  });
}

TWIN_EXPORT int TWIN_NAME(cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync)(void* to, const void* from,
                                                                    size_t bytes, Handle stream) {
  const char* const call = __func__;
  return Exported(call, Needs::kDevice, [&](Twin& twin) {
    return Copy(twin, call, to, from, bytes, stream, Direction::kOnDevice);
  });
}

TWIN_EXPORT int TWIN_NAME(cuMemsetD8Async, hipMemsetD8Async)(void* to, unsigned char value,
                                                             size_t count, Handle stream) {
  const char* const call = __func__;
  return Exported(call, Needs::kDevice,
                  [&](Twin& twin) { return Fill(twin, call, to, value, 1, count, stream); });
}

TWIN_EXPORT int TWIN_NAME(cuMemsetD32Async, hipMemsetD32Async)(void* to, unsigned value,
                                                               size_t count, Handle stream) {
  const char* const call = __func__;
  return Exported(call, Needs::kDevice,
                  [&](Twin& twin) { return Fill(twin, call, to, value, 4, count, stream); });
}

TWIN_EXPORT int TWIN_NAME(cuMemAlloc_v2, hipMalloc)(void** address, size_t bytes) {
  return Exported(__func__, Needs::kDevice, [&](Twin& twin) -> int {
    if (int code = WaitForMemory(twin)) return code;
    return twin.memory.Allocate(CurrentDevice(twin), Kind::kDevice, bytes, address);
  });
}

TWIN_EXPORT int TWIN_NAME(cuMemFree_v2, hipFree)(void* address) {
  return Exported(__func__, Needs::kDevice, [&](Twin& twin) { return Free(twin, address, false); });
}

TWIN_EXPORT int TWIN_NAME(cuMemHostAlloc, hipHostMalloc)(void** address, size_t bytes,
                                                         unsigned flags) {
  return Exported(__func__, Needs::kDevice, [&](Twin& twin) -> int {
    if (flags != TWIN_NAME(3u, 0x40000003u)) return Code::kInvalidValue;  // HIP: coherent
    if (int code = WaitForMemory(twin)) return code;
    return twin.memory.Allocate(CurrentDevice(twin), Kind::kHostAllocated, bytes, address);
  });
}

TWIN_EXPORT int TWIN_NAME(cuMemFreeHost, hipHostFree)(void* address) {
  return Exported(__func__, Needs::kDevice, [&](Twin& twin) { return Free(twin, address, true); });
}

TWIN_EXPORT int TWIN_NAME(cuMemHostRegister_v2, hipHostRegister)(void* base, size_t bytes,
                                                                 unsigned flags) {
  return Exported(__func__, Needs::kDevice, [&](Twin& twin) -> int {
    if (flags != 3) return Code::kInvalidValue;  // portable and mapped
    return Register(twin, base, bytes);
  });
}

TWIN_EXPORT int TWIN_NAME(cuMemHostUnregister, hipHostUnregister)(void* base) {
  return Exported(__func__, Needs::kDevice, [&](Twin& twin) { return Unregister(twin, base); });
}

TWIN_EXPORT int TWIN_NAME(cuMemHostGetDevicePointer_v2,
                          hipHostGetDevicePointer)(void** device, void* host, unsigned flags) {
  return Exported(__func__, Needs::kDevice, [&](Twin& twin) -> int {
    if (flags != 0) return Code::kInvalidValue;
    return DeviceAddress(twin, host, device);
  });
}

// --- What older drivers lack: left out of the old twins. ---
#ifndef TWIN_WITHOUT_OPTIONAL_SYMBOLS

TWIN_EXPORT int TWIN_NAME(cuStreamWriteValue32_v2,
                          hipStreamWriteValue32)(Handle stream, uintptr_t address, uint32_t value,
                                                 unsigned flags) {
  const char* const call = __func__;
  return Exported(call, Needs::kDevice, [&](Twin& twin) -> int {
    if (flags != 0) return Code::kInvalidValue;
    return MemoryOperations(twin, call, stream, {{false, address, value, 0}});
  });
}

TWIN_EXPORT int TWIN_NAME(cuLaunchHostFunc,
                          hipLaunchHostFunc)(Handle stream, void (*function)(void*), void* data) {
  const char* const call = __func__;
  return Exported(call, Needs::kDevice,
                  [&](Twin& twin) { return HostFunction(twin, call, stream, function, data); });
}

TWIN_EXPORT int TWIN_NAME(cuMemGetHandleForAddressRange,
                          hipMemGetHandleForAddressRange)(void* handle, uintptr_t address,
                                                          size_t bytes, int type,
                                                          unsigned long long flags) {
  return Exported(__func__, Needs::kDevice, [&](Twin& twin) -> int {
    if (flags != 0) return Code::kInvalidValue;
    return Export(twin, handle, address, bytes, type);
  });
}

#endif  // TWIN_WITHOUT_OPTIONAL_SYMBOLS

}  // namespace hetccl::twin
