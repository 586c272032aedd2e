// What tests ask of the twin, exported by both libraries. control.h says what each does.
#include <cstdint>
#include <string>

#include "xla_ffi/device/twin/export.h"
#include "xla_ffi/device/twin/twin.h"

using hetccl::twin::Kind;
using hetccl::twin::TheTwin;
using hetccl::twin::Twin;

TWIN_EXPORT int twin_set(const char* number, int64_t value) {
  return TheTwin().settings.SetNumber(number, value) ? 0 : -1;
}

TWIN_EXPORT void twin_set_attribute(int attribute, int value) {
  TheTwin().settings.SetAttribute(attribute, value);
}

TWIN_EXPORT void twin_fail(const char* call, int64_t nth, int code) {
  TheTwin().settings.Fail(call, nth, code);
}

TWIN_EXPORT void twin_fail_when_run(const char* call, int64_t nth, int code) {
  TheTwin().settings.FailWhenRun(call, nth, code);
}

TWIN_EXPORT void twin_delay(const char* call, int64_t microseconds) {
  TheTwin().settings.Delay(call, microseconds);
}

TWIN_EXPORT int twin_load(int device) { return hetccl::twin::WaitInContext(TheTwin(), device); }

TWIN_EXPORT int64_t twin_calls(const char* call) { return TheTwin().settings.Count(call); }

TWIN_EXPORT void twin_clear_calls() { TheTwin().settings.ClearCounts(); }

TWIN_EXPORT int64_t twin_live(const char* what) {
  Twin& twin = TheTwin();
  const std::string name = what;
  if (name == "streams") return twin.scheduler.streams();
  if (name == "events") return twin.scheduler.events();
  const auto bytes = [&](Kind kind) { return static_cast<int64_t>(twin.memory.bytes(kind)); };
  if (name == "device_bytes") return bytes(Kind::kDevice);
  if (name == "host_bytes") return bytes(Kind::kHostAllocated);
  if (name == "registered_bytes") return bytes(Kind::kHostRegistered);
  if (name == "signal_bytes") return bytes(Kind::kSignal);
  return -1;
}

TWIN_EXPORT void twin_reset() {
  Twin& twin = TheTwin();
  twin.scheduler.Reset();
  twin.memory.Clear();
  twin.settings.ClearFaults();
  twin.settings.ClearCounts();
}
