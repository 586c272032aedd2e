// Error codes of the test twin. Both vendors document the same numbers for these.
#ifndef XLA_FFI_DEVICE_TWIN_CODES_H_
#define XLA_FFI_DEVICE_TWIN_CODES_H_

namespace hetccl::twin {

enum Code : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotReady = 600,
  kIllegalAddress = 700,
  kHostMemoryAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kLaunchFailed = 719,
  kNotPermitted = 800,
  kNotSupported = 801,
};

// After one of these a device is lost to the process: every later call returns the code again.
constexpr bool IsSticky(int code) {
  return code >= 700 && code < 720 && code != 712 && code != 713;
}

struct CodeText {
  int code;
  const char* cuda;  // CUDA_ERROR_…
  const char* hip;   // hipError…
  const char* text;
};
// Null for a code that the twin never gives.
const CodeText* Find(int code);

}  // namespace hetccl::twin

#endif  // XLA_FFI_DEVICE_TWIN_CODES_H_
