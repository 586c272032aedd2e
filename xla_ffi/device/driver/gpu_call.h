// How the methods of Gpu call the driver: the one place that turns error codes into Status.
// Included by gpu*.cc only.
#ifndef XLA_FFI_DEVICE_DRIVER_GPU_CALL_H_
#define XLA_FFI_DEVICE_DRIVER_GPU_CALL_H_

#include "xla_ffi/device/driver/abi.h"
#include "xla_ffi/device/driver/gpu.h"

namespace hetccl::device {

template <typename... Formal, typename... Actual>
Status Gpu::Call(const Entry<Formal...>& entry, Actual... actual) const {
  if (entry.call == nullptr) return Lacks(entry.name);
  const int code = entry.call(actual...);
  return code == abi::kSuccess ? Status() : Failed(entry.name, code);
}

// For queries, where "not ready" is an answer.
template <typename... Formal, typename... Actual>
Status Gpu::Ask(const Entry<Formal...>& entry, bool* done, Actual... actual) const {
  const int code = entry.call(actual...);
  *done = code == abi::kSuccess;
  if (*done) return Status();
  if (code != abi::kNotReady) return Failed(entry.name, code);
  Forget();
  return Status();
}

}  // namespace hetccl::device

#endif  // XLA_FFI_DEVICE_DRIVER_GPU_CALL_H_
