// For the libraries of the test twin: what is visible outside.
#ifndef XLA_FFI_DEVICE_TWIN_EXPORT_H_
#define XLA_FFI_DEVICE_TWIN_EXPORT_H_

#include "xla_ffi/device/twin/twin.h"

#define TWIN_EXPORT extern "C" __attribute__((visibility("default")))

// The name of a function that both interfaces have with the same parameters.
#ifdef TWIN_OF_HIP
#define TWIN_NAME(cuda, hip) hip
#else
#define TWIN_NAME(cuda, hip) cuda
#endif

#endif  // XLA_FFI_DEVICE_TWIN_EXPORT_H_
