// The driver table: one struct of function pointers with neutral names, filled from the symbols of
// libcuda.so.1 or of libamdhip64.so when the process runs. No header of a toolkit is needed: the
// signatures below are those of the two public C interfaces, with device addresses as void* (both
// interfaces pass them as one 64-bit word).
#ifndef XLA_FFI_DEVICE_DRIVER_TABLE_H_
#define XLA_FFI_DEVICE_DRIVER_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "xla_ffi/common/status.h"
#include "xla_ffi/device/driver/types.h"

namespace hetccl::device {

static_assert(sizeof(void*) == 8, "CUdeviceptr and void* have to be one word alike");

// One symbol: the name that the library exports, for messages, and its address. All functions that
// return an error code return int; 0 is success in both interfaces.
template <typename... Args>
struct Entry {
  const char* name = nullptr;
  int (*call)(Args...) = nullptr;

  explicit operator bool() const { return call != nullptr; }
};

// Which symbol stands behind an entry, and since when, is written down in table.cc alone.
struct Table {
  Vendor vendor = Vendor::kCuda;
  std::string library;  // as it was opened
  std::string missing;  // optional symbols that it lacks

  Entry<unsigned> Init;
  Entry<int*> DriverGetVersion;
  Entry<int, const char**> GetErrorName;    // CUDA
  Entry<int, const char**> GetErrorString;  // CUDA
  const char* (*HipGetErrorName)(int) = nullptr;
  const char* (*HipGetErrorString)(int) = nullptr;
  Entry<> GetLastError;  // HIP keeps the last error for each thread until it is asked for

  Entry<int*> DeviceGetCount;
  Entry<int*, int> DeviceGet;
  Entry<int*, int, int> DeviceGetAttribute;
  Entry<char*, int, int> DeviceGetName;
  Entry<char*, int, int> DeviceGetPCIBusId;
  Entry<int*> CurrentDevice;
  Entry<int> SetDevice;                         // HIP
  Entry<Context*, int> DevicePrimaryCtxRetain;  // CUDA, like the next three
  Entry<Context> CtxSetCurrent;
  Entry<Context> CtxPushCurrent;
  Entry<Context*> CtxPopCurrent;

  Entry<int*, int*> GetStreamPriorityRange;
  Entry<Stream*, unsigned, int> StreamCreateWithPriority;
  Entry<Stream> StreamDestroy;
  Entry<Stream> StreamQuery;
  Entry<Stream> StreamSynchronize;
  Entry<Event*, unsigned> EventCreate;
  Entry<Event, Stream> EventRecord;
  Entry<Event> EventQuery;

  Entry<void*, const void*, size_t, Stream> MemcpyDtoHAsync;
  Entry<void*, const void*, size_t, Stream> MemcpyHtoDAsync;
  Entry<void*, const void*, size_t, Stream> MemcpyDtoDAsync;
  Entry<void*, unsigned char, size_t, Stream> MemsetD8Async;
  Entry<void*, unsigned, size_t, Stream> MemsetD32Async;

  Entry<void**, size_t> MemAlloc;
  Entry<void*> MemFree;
  Entry<void**, size_t, unsigned> MemHostAlloc;
  Entry<void*> MemFreeHost;
  Entry<void*, size_t, unsigned> MemHostRegister;
  Entry<void*> MemHostUnregister;
  Entry<void**, void*, unsigned> MemHostGetDevicePointer;
  Entry<void**, size_t, unsigned> MallocWithFlags;  // HIP: signal memory

  Entry<Stream, void*, uint32_t, unsigned> StreamWaitValue32;                  // CUDA
  Entry<Stream, void*, uint32_t, unsigned, uint32_t> StreamWaitValue32Masked;  // HIP
  Entry<Stream, void*, uint32_t, unsigned> StreamWriteValue32;
  Entry<Stream, HostFunction, void*> LaunchHostFunc;

  Entry<void*, const void*, size_t, int, unsigned long long> MemGetHandleForAddressRange;
  Entry<const void*, size_t, int*, uint64_t*> ExportDmaBuf;  // HSA, below HIP
  Entry<int, int> FlushGPUDirectRDMAWrites;                  // CUDA
};

// Opens the library and fills the table. `library` empty: the vendor's usual names, in order. An
// error names the library, or the first symbol that is missing and the version that has it. The
// library stays open for the life of the process: drivers do not survive being unloaded.
Status LoadTable(Vendor vendor, const std::string& library, Table* table);

}  // namespace hetccl::device

#endif  // XLA_FFI_DEVICE_DRIVER_TABLE_H_
