// How a test speaks with a test twin of the GPU drivers that it (or the driver table) has loaded.
#ifndef XLA_FFI_DEVICE_TWIN_CONTROL_H_
#define XLA_FFI_DEVICE_TWIN_CONTROL_H_

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "xla_ffi/device/driver/types.h"

namespace hetccl::twin {

// The file of a twin. Bazel runs tests where this path is right; elsewhere TWIN_DIRECTORY names the
// directory. `variant` "old": without the symbols that older drivers lack.
inline std::string Library(device::Vendor vendor, const std::string& variant = "") {
  const char* directory = std::getenv("TWIN_DIRECTORY");
  std::string name = vendor == device::Vendor::kCuda ? "libcuda_" : "libamdhip64_";
  if (!variant.empty()) name += variant + "_";
  return std::string(directory != nullptr ? directory : "xla_ffi/device/twin") + "/" + name +
         "twin.so";
}

// The functions that the twin exports beside the driver's. `call` is always an exported name, such
// as "cuMemcpyDtoHAsync_v2" or "hipMemcpyDtoHAsync". Thread-safe.
class Control {
 public:
  // Loads the twin, or finds it loaded. Ends the test process if there is none.
  explicit Control(const std::string& library)
      : handle_(::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) {
      std::fprintf(stderr, "no test twin: %s\n", ::dlerror());
      std::abort();
    }
  }
  explicit Control(device::Vendor vendor) : Control(Library(vendor)) {}

  // A number of the twin. Before the first driver call: "devices" (2), "driver_version"; before the
  // first stream of a device, or after Reset: "queues" (8), its hardware queues. Any time:
  // "same_addresses" (0: registered memory has other addresses on the device), "jitter_us" (0: the
  // most that each operation is delayed by chance), "memory_waits" (0; 1: allocations,
  // registrations and their ends wait for the device as Load does).
  // Every one can also come from the environment: TWIN_DEVICES and so on.
  void Set(const char* number, int64_t value) const {
    if (Function<int(const char*, int64_t)>("twin_set")(number, value) != 0) Fatal(number);
  }
  // What cuDeviceGetAttribute, hipDeviceGetAttribute answer.
  void SetAttribute(int attribute, int value) const {
    Function<void(int, int)>("twin_set_attribute")(attribute, value);
  }
  // The nth call from now on (1: the next) returns this code and does nothing. Codes that lose the
  // device (700, 719) do so. TWIN_FAIL="call:nth:code,…".
  void Fail(const char* call, int64_t nth, int code) const {
    Function<void(const char*, int64_t, int)>("twin_fail")(call, nth, code);
  }
  // The nth operation that such a call queued loses its device when it is to run: all later calls
  // return this code. TWIN_FAIL_WHEN_RUN="call:nth:code,…".
  void FailWhenRun(const char* call, int64_t nth, int code) const {
    Function<void(const char*, int64_t, int)>("twin_fail_when_run")(call, nth, code);
  }
  // Operations queued by such calls wait this long before they run. TWIN_DELAY="call:us,…".
  void Delay(const char* call, int64_t microseconds) const {
    Function<void(const char*, int64_t)>("twin_delay")(call, microseconds);
  }
  // What the load of a module or kernel may do: takes the device's context, which every other call
  // that concerns the device needs, until the device is idle. Returns then, with the driver's code.
  int Load(int device) const { return Function<int(int)>("twin_load")(device); }
  // How often it was called since the start, Reset, or ClearCalls.
  int64_t Calls(const char* call) const {
    return Function<int64_t(const char*)>("twin_calls")(call);
  }
  void ClearCalls() const { Function<void()>("twin_clear_calls")(); }
  // What exists now: "streams", "events", "device_bytes", "host_bytes" (allocated by the driver),
  // "registered_bytes", "signal_bytes".
  int64_t Live(const char* what) const {
    const int64_t count = Function<int64_t(const char*)>("twin_live")(what);
    if (count < 0) Fatal(what);
    return count;
  }
  // Drops streams with what is queued, events and memory, mends lost devices, and forgets failures,
  // delays and counts. Numbers and attributes stay. No other thread may use the driver meanwhile.
  void Reset() const { Function<void()>("twin_reset")(); }

 private:
  template <typename Signature>
  Signature* Function(const char* name) const {
    auto* function = reinterpret_cast<Signature*>(::dlsym(handle_, name));
    if (function == nullptr) Fatal(name);
    return function;
  }
  [[noreturn]] static void Fatal(const char* name) {
    std::fprintf(stderr, "the test twin knows no %s\n", name);
    std::abort();
  }

  void* handle_;
};

}  // namespace hetccl::twin

#endif  // XLA_FFI_DEVICE_TWIN_CONTROL_H_
