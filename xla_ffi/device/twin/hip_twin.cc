// libamdhip64_twin.so: the hip* names of the test twin, those of the driver table. Not AMD's
// runtime.
#include <cstddef>
#include <cstdint>

#include "xla_ffi/device/twin/export.h"
#include "xla_ffi/device/twin/twin.h"

using hetccl::twin::Code;
using hetccl::twin::CurrentDevice;
using hetccl::twin::Exported;
using hetccl::twin::Handle;
using hetccl::twin::Kind;
using hetccl::twin::Needs;
using hetccl::twin::ThisThread;
using hetccl::twin::Twin;

hetccl::twin::Personality hetccl::twin::ThisPersonality() {
  Personality personality;
  personality.cuda = false;
  personality.version = 60342134;
  personality.least_priority = 1;
  personality.greatest_priority = -1;
  personality.same_addresses = 4;  // hipDeviceAttributeCanUseHostPointerForRegisteredMem
  personality.can_wait = 10013;    // hipDeviceAttributeCanUseStreamWaitValue
  personality.dma_buf = 93;        // hipDeviceAttributeDmaBufSupported
  // Not hipDeviceAttributeHostNumaId: this version is too old for it.
  personality.attributes = {{93, 1}, {10013, 1}};
  personality.explicit_contexts = false;
  personality.waits_on_signals_only = true;
  return personality;
}

TWIN_EXPORT int hipInit(unsigned flags) {
  return Exported("hipInit", Needs::kInitialised,
                  [&](Twin&) -> int { return flags == 0 ? Code::kSuccess : Code::kInvalidValue; });
}

TWIN_EXPORT const char* hipGetErrorName(int code) {
  const auto* text = hetccl::twin::Find(code);
  return text == nullptr ? "hipErrorUnknown" : text->hip;
}

TWIN_EXPORT const char* hipGetErrorString(int code) {
  const auto* text = hetccl::twin::Find(code);
  return text == nullptr ? "unknown error" : text->text;
}

TWIN_EXPORT int hipGetLastError() {
  const int code = ThisThread().last_error;
  ThisThread().last_error = Code::kSuccess;
  return code;
}

TWIN_EXPORT int hipGetDevice(int* device) {
  return Exported("hipGetDevice", Needs::kInitialised, [&](Twin& twin) -> int {
    *device = CurrentDevice(twin);
    return Code::kSuccess;
  });
}

TWIN_EXPORT int hipSetDevice(int device) {
  return Exported("hipSetDevice", Needs::kInitialised, [&](Twin& twin) -> int {
    if (device < 0 || device >= twin.devices()) return Code::kInvalidDevice;
    ThisThread().device = device;
    return Code::kSuccess;
  });
}

TWIN_EXPORT int hipExtMallocWithFlags(void** address, size_t bytes, unsigned flags) {
  return Exported("hipExtMallocWithFlags", Needs::kDevice, [&](Twin& twin) -> int {
    constexpr unsigned kDefault = 0, kFineGrained = 1, kSignalMemory = 2;
    if (int code = hetccl::twin::WaitForMemory(twin)) return code;
    if (flags == kSignalMemory) {
      if (bytes != 8) return Code::kInvalidValue;  // a signal each
      return twin.memory.Allocate(CurrentDevice(twin), Kind::kSignal, bytes, address);
    }
    if (flags != kDefault && flags != kFineGrained) return Code::kInvalidValue;
    return twin.memory.Allocate(CurrentDevice(twin), Kind::kDevice, bytes, address);
  });
}

// Left out of libamdhip64_old_twin.so.
#ifndef TWIN_WITHOUT_OPTIONAL_SYMBOLS

TWIN_EXPORT int hipStreamWaitValue32(Handle stream, uintptr_t address, uint32_t value,
                                     unsigned flags, uint32_t mask) {
  constexpr const char* kCall = "hipStreamWaitValue32";
  return Exported(kCall, Needs::kDevice, [&](Twin& twin) -> int {
    return hetccl::twin::MemoryOperations(twin, kCall, stream,
                                          {{true, address, value, flags, mask}});
  });
}

#endif  // TWIN_WITHOUT_OPTIONAL_SYMBOLS
