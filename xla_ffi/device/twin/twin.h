// The TEST TWIN of the GPU drivers: no driver and no GPU, but what a test needs of one, on threads
// of the process. Built into two libraries for tests only, libcuda_twin.so (cu* names) and
// libamdhip64_twin.so (hip* names). Where the vendors' documents are strict, so is the twin.
#ifndef XLA_FFI_DEVICE_TWIN_TWIN_H_
#define XLA_FFI_DEVICE_TWIN_TWIN_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "xla_ffi/device/twin/codes.h"
#include "xla_ffi/device/twin/memory.h"
#include "xla_ffi/device/twin/scheduler.h"
#include "xla_ffi/device/twin/settings.h"

namespace hetccl::twin {

// What differs between the two; given by the library that the twin is built into.
struct Personality {
  bool cuda = true;
  int version = 0;
  int least_priority = 0;
  int greatest_priority = 0;
  // CUDA: a context has to be current. HIP: device 0 is, unless another was set.
  bool explicit_contexts = true;
  // HIP: waits take signal memory only, and comparisons are not cyclic.
  bool waits_on_signals_only = false;
  // The device attributes that this driver knows, and what it answers; the numbers of some.
  std::map<int, int> attributes;
  int same_addresses = 0;
  int can_wait = 0;  // 0: needs no attribute
  int dma_buf = 0;
};
Personality ThisPersonality();

// Everything of this twin; never destroyed, its threads may run while the process ends.
struct Twin {
  explicit Twin(const Personality& personality);

  const Personality is;
  Settings settings;
  Memory memory;
  Scheduler scheduler;
  std::atomic<bool> initialised{false};
  // The locks of the devices' contexts: whoever waits for a device with its lock keeps all other
  // calls that concern the device waiting.
  std::array<std::mutex, kMaxDevices> contexts;

  int devices() const { return static_cast<int>(settings.Number("devices")); }
};
Twin& TheTwin();

// Nothing for an attribute that this driver does not know.
std::optional<int> AttributeOf(const Twin& twin, int attribute);

// What the driver keeps for each calling thread.
struct CallingThread {
  std::vector<int> contexts;  // devices whose contexts are current, the last one on top
  int device = 0;             // HIP
  int last_error = 0;         // HIP
};
CallingThread& ThisThread();
// The device that is current on this thread; -1: none.
int CurrentDevice(const Twin& twin);

enum class Needs { kNothing, kInitialised, kDevice };

// What every exported function does first: counts, fails if it was asked to, and refuses.
int Admit(Twin& twin, const char* call, Needs needs);

// Waits until nobody has the lock of the current device's context.
void PassContext(Twin& twin);
// What a load of a module may do: takes the lock of the device's context until the device is idle.
int WaitInContext(Twin& twin, int device);
// The same where the number "memory_waits" asks for it: allocations, registrations and their ends
// may do so.
int WaitForMemory(Twin& twin);

template <typename Body>
int Exported(const char* call, Needs needs, Body&& body) {
  Twin& twin = TheTwin();
  int code = Admit(twin, call, needs);
  if (code == kSuccess && needs == Needs::kDevice) PassContext(twin);
  if (code == kSuccess) code = body(twin);
  if (code != kSuccess) ThisThread().last_error = code;
  return code;
}

// --- What both libraries' functions come down to. Codes of codes.h. ---

enum class Direction { kToHost, kToDevice, kOnDevice };
int Copy(Twin& twin, const char* call, void* to, const void* from, size_t bytes, Handle stream,
         Direction direction);
// `size`: bytes of the pattern, 1 or 4.
int Fill(Twin& twin, const char* call, void* to, uint32_t pattern, size_t size, size_t count,
         Handle stream);

struct ValueOperation {
  bool wait = false;
  uintptr_t address = 0;
  uint32_t value = 0;
  unsigned flags = 0;
  uint32_t mask = 0xFFFFFFFF;
};
// All are checked first: either all are queued, in order, or none.
int MemoryOperations(Twin& twin, const char* call, Handle stream,
                     const std::vector<ValueOperation>& operations);

int HostFunction(Twin& twin, const char* call, Handle stream, void (*function)(void*), void* data);

// Frees wait for what is queued on the device, as the drivers' do.
int Free(Twin& twin, void* address, bool host_memory);
int Register(Twin& twin, void* base, size_t bytes);
int Unregister(Twin& twin, void* base);
int DeviceAddress(Twin& twin, void* host, void** device);
int Export(Twin& twin, void* handle, uintptr_t address, size_t bytes, int type);
int Name(Twin& twin, char* text, int length, int device);
int PciBusId(Twin& twin, char* text, int length, int device);

}  // namespace hetccl::twin

#endif  // XLA_FFI_DEVICE_TWIN_TWIN_H_
