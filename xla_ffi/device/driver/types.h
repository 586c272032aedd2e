// What the GPU drivers of both vendors have in common, in neutral words and without their headers.
#ifndef XLA_FFI_DEVICE_DRIVER_TYPES_H_
#define XLA_FFI_DEVICE_DRIVER_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace hetccl::device {

enum class Vendor { kCuda = 0, kHip };

// "CUDA", "ROCm": the platform names that XLA uses too.
const char* PlatformName(Vendor vendor);

// Handles of the driver; what they point to is the driver's own.
using Stream = struct StreamHandle*;    // CUstream, hipStream_t; null: the legacy default stream
using Event = struct EventHandle*;      // CUevent, hipEvent_t
using Context = struct ContextHandle*;  // CUcontext; HIP has none

using HostFunction = void (*)(void* data);  // CUhostFn, hipHostFn_t

enum class Compare {
  // CUDA: cyclic, (int32_t)(*address - value) >= 0. HIP: *address >= value as unsigned numbers, so
  // counters that may pass 2^31 need a reset there.
  kAtLeast = 0,
  kEqual = 1,
};

// A 32-bit flag that the host and streams write and that streams may wait on. `host` and `device`
// are the same memory, seen from the two sides.
struct Signal {
  uint32_t* host = nullptr;
  void* device = nullptr;
};

// Whether writes of a network card into device memory can be seen by the device once a flag of
// theirs can be seen. Numbers of CUgpuDirectRDMAWritesOrdering.
enum class WritesOrdering { kNone = 0, kOwner = 100, kAllDevices = 200 };

// What a device and its driver can do; queried once when the device is opened.
struct Capabilities {
  // StreamWaitValue32 and StreamWriteValue32.
  bool stream_memory_operations = false;
  // They take any registered host memory. False: waits take memory of SignalAlloc only (HIP).
  bool waits_on_registered_memory = false;
  // A wait can flush remote writes by itself.
  bool wait_flushes_remote_writes = false;
  bool host_functions = false;
  // Device addresses of registered host memory equal the host's.
  bool same_host_addresses = false;
  bool dma_buf = false;
  bool gpu_direct_rdma = false;
  WritesOrdering writes_ordering = WritesOrdering::kNone;
  // FlushRemoteWrites may be called on the host.
  bool host_flush = false;
  // The NUMA node of the host next to the device, -1 if the driver does not tell.
  int host_numa_node = -1;
  // Optional symbols that the library lacks, "a, b"; empty if it has all.
  std::string missing;
};

}  // namespace hetccl::device

#endif  // XLA_FFI_DEVICE_DRIVER_TYPES_H_
