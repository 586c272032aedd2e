// One GPU and what the exchange asks its driver to do.
#ifndef XLA_FFI_DEVICE_DRIVER_GPU_H_
#define XLA_FFI_DEVICE_DRIVER_GPU_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "xla_ffi/common/status.h"
#include "xla_ffi/device/driver/driver.h"
#include "xla_ffi/device/driver/types.h"

namespace hetccl::device {

// Thin: every method is one driver call, and its error names the call, the
// device and the driver's own name for the error. Methods may be called on any thread, with the
// device current there (MakeCurrent, ScopedCurrent, or a thread of XLA that runs a handler).
//
// "Asynchronous" methods only queue; nothing that they are given may change or be freed until the
// stream has passed them. Errors of the device may also show up in later calls (they are sticky).
class Gpu {
 public:
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  const Driver& driver() const { return driver_; }
  Vendor vendor() const { return driver_.vendor(); }
  int ordinal() const { return ordinal_; }
  const std::string& name() const { return name_; }              // "NVIDIA H200"
  const std::string& pci_bus_id() const { return pci_bus_id_; }  // "0000:1b:00.0"
  const Capabilities& capabilities() const { return capabilities_; }

  // Makes the device current on the calling thread for good: for threads of our own.
  Status MakeCurrent() const;

  // --- Streams. Ours never synchronise with the legacy default stream. ---
  Status StreamCreate(bool high_priority, Stream* stream) const;
  // What is queued still runs; the driver frees the stream behind it.
  Status StreamDestroy(Stream stream) const;
  // Whether everything queued so far is done. Does not wait.
  Status StreamQuery(Stream stream, bool* done) const;
  // Waits on the host, without a bound: never from a handler, never behind a wait for a peer.
  Status StreamSynchronize(Stream stream) const;

  // --- Events, without timing. ---
  Status EventCreate(Event* event) const;
  Status EventRecord(Event event, Stream stream) const;
  Status EventQuery(Event event, bool* done) const;

  // --- Asynchronous copies and fills; sizes in bytes but for MemsetD32Async's words. Host memory
  // has to be registered or the call waits for the copy. ---
  Status MemcpyDtoHAsync(void* host, const void* device, size_t bytes, Stream stream) const;
  Status MemcpyHtoDAsync(void* device, const void* host, size_t bytes, Stream stream) const;
  Status MemcpyDtoDAsync(void* to, const void* from, size_t bytes, Stream stream) const;
  Status MemsetD8Async(void* device, uint8_t value, size_t bytes, Stream stream) const;
  Status MemsetD32Async(void* device, uint32_t value, size_t words, Stream stream) const;

  // --- Memory. Slow (the driver may synchronise the device): never once per exchange. ---
  Status MemAlloc(size_t bytes, void** device) const;
  Status MemFree(void* device) const;
  // Page-locked host memory, mapped for all devices.
  Status MemHostAlloc(size_t bytes, void** host) const;
  Status MemFreeHost(void* host) const;
  // Page-locks memory of ours (a shared segment, say) and maps it for all devices. Page aligned.
  Status MemHostRegister(void* host, size_t bytes) const;
  Status MemHostUnregister(void* host) const;
  // The device's address of page-locked host memory.
  Status MemHostGetDevicePointer(void* host, void** device) const;
  // A flag that streams of this device may wait on, for the life of the process. The driver may
  // take a page for each.
  Status SignalAlloc(Signal* signal) const;

  // --- Stream memory operations, asynchronous; need capabilities().stream_memory_operations. ---
  // Later work of the stream waits until the word at `address` compares to `value`. `flush` also
  // makes remote writes that came before visible; needs wait_flushes_remote_writes.
  Status StreamWaitValue32(Stream stream, void* address, uint32_t value, Compare compare,
                           bool flush = false) const;
  // Writes the word once all earlier work of the stream is done and can be seen.
  Status StreamWriteValue32(Stream stream, void* address, uint32_t value) const;

  // Asynchronous: runs function(data) on the driver's one thread for all host functions. It must
  // not call the driver, and must not wait for another host function.
  Status LaunchHostFunc(Stream stream, HostFunction function, void* data) const;

  // --- GPUDirect. ---
  // A new descriptor of device memory for a network card; the caller closes it. The range begins
  // `offset` bytes into what the descriptor stands for.
  Status ExportDmaBuf(const void* device, size_t bytes, int* descriptor, uint64_t* offset) const;
  // Waits until remote writes that have arrived can be seen by this device; needs host_flush.
  Status FlushRemoteWrites() const;

 private:
  friend class Driver;
  friend class ScopedCurrent;

  Gpu(const Driver& driver, int ordinal) : driver_(driver), ordinal_(ordinal) {}

  Status Initialise();
  void QueryCapabilities();
  // Nothing where the vendor or the driver does not know the attribute.
  std::optional<int> Attribute(int cuda, int hip) const;
  std::string Label() const;
  Status Failed(const char* call, int code) const;
  Status Lacks(const char* symbol) const;
  void Forget() const;
  template <typename... Formal, typename... Actual>
  Status Call(const Entry<Formal...>& entry, Actual... actual) const;
  template <typename... Formal, typename... Actual>
  Status Ask(const Entry<Formal...>& entry, bool* done, Actual... actual) const;

  const Driver& driver_;
  const int ordinal_;
  int device_ = 0;             // CUdevice, hipDevice_t
  Context context_ = nullptr;  // CUDA: the primary context
  int high_priority_ = 0;
  std::string name_;
  std::string pci_bus_id_;
  Capabilities capabilities_;
};

// The device is current on the calling thread while this lives; then what was before is again.
class ScopedCurrent {
 public:
  explicit ScopedCurrent(const Gpu& gpu);
  ~ScopedCurrent();
  ScopedCurrent(const ScopedCurrent&) = delete;
  ScopedCurrent& operator=(const ScopedCurrent&) = delete;

  const Status& status() const { return status_; }

 private:
  const Gpu& gpu_;
  int before_ = -1;  // HIP
  Status status_;
};

}  // namespace hetccl::device

#endif  // XLA_FFI_DEVICE_DRIVER_GPU_H_
