#include "xla_ffi/device/twin/codes.h"

namespace hetccl::twin {
namespace {

constexpr CodeText kTexts[] = {
    {kSuccess, "CUDA_SUCCESS", "hipSuccess", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "hipErrorInvalidValue", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "hipErrorOutOfMemory", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "hipErrorNotInitialized",
     "initialization error"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "hipErrorNoDevice", "no device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "hipErrorInvalidDevice",
     "invalid device ordinal"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "hipErrorInvalidContext",
     "invalid device context"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "hipErrorInvalidHandle",
     "invalid resource handle"},
    {kNotReady, "CUDA_ERROR_NOT_READY", "hipErrorNotReady", "device not ready"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "hipErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {kHostMemoryAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "hipErrorHostMemoryAlreadyRegistered", "host memory is already registered"},
    {kHostMemoryNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "hipErrorHostMemoryNotRegistered", "host memory is not registered"},
    {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "hipErrorLaunchFailure",
     "unspecified launch failure"},
    {kNotPermitted, "CUDA_ERROR_NOT_PERMITTED", "hipErrorNotPermitted", "operation not permitted"},
    {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "hipErrorNotSupported", "operation not supported"},
};

}  // namespace

const CodeText* Find(int code) {
  for (const CodeText& text : kTexts) {
    if (text.code == code) return &text;
  }
  return nullptr;
}

}  // namespace hetccl::twin
