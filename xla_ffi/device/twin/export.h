// For the libraries of the test twin: what is visible outside, and the layout of batches.
#ifndef XLA_FFI_DEVICE_TWIN_EXPORT_H_
#define XLA_FFI_DEVICE_TWIN_EXPORT_H_

#include <cstdint>

#include "xla_ffi/device/twin/twin.h"

#define TWIN_EXPORT extern "C" __attribute__((visibility("default")))

// The name of a function that both interfaces have with the same parameters.
#ifdef TWIN_OF_HIP
#define TWIN_NAME(cuda, hip) hip
#else
#define TWIN_NAME(cuda, hip) cuda
#endif

namespace hetccl::twin {

// CUstreamBatchMemOpParams, hipStreamBatchMemOpParams.
struct BatchEntry {
  uint32_t operation;  // 1: wait for a 32-bit value, 2: write one
  uint64_t address;
  uint64_t value;
  uint32_t flags;
  uint64_t alias;
  uint64_t padding;
};
static_assert(sizeof(BatchEntry) == 48);

int Batch(Twin& twin, const char* call, Handle stream, unsigned count, const BatchEntry* entries,
          unsigned flags);

}  // namespace hetccl::twin

#endif  // XLA_FFI_DEVICE_TWIN_EXPORT_H_
