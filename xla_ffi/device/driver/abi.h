// Numbers of the two public driver interfaces that the table is called with, each with the name
// that its vendor documents. Facts of cuda.h (CUDA 12, 13) and of hip_runtime_api.h (ROCm 6, 7).
#ifndef XLA_FFI_DEVICE_DRIVER_ABI_H_
#define XLA_FFI_DEVICE_DRIVER_ABI_H_

#include <cstdint>

namespace hetccl::device::abi {

// The same in both interfaces.
inline constexpr int kSuccess = 0;          // CUDA_SUCCESS, hipSuccess
inline constexpr int kInvalidValue = 1;     // CUDA_ERROR_INVALID_VALUE, hipErrorInvalidValue
inline constexpr int kNoDevice = 100;       // CUDA_ERROR_NO_DEVICE, hipErrorNoDevice
inline constexpr int kInvalidDevice = 101;  // CUDA_ERROR_INVALID_DEVICE, hipErrorInvalidDevice
inline constexpr int kNotReady = 600;       // CUDA_ERROR_NOT_READY, hipErrorNotReady
inline constexpr unsigned kStreamNonBlocking = 1;  // CU_STREAM_NON_BLOCKING, hipStreamNonBlocking
inline constexpr unsigned kEventDisableTiming =
    2;  // CU_EVENT_DISABLE_TIMING, hipEventDisableTiming
// CU_MEMHOSTREGISTER_PORTABLE | _DEVICEMAP, hipHostRegisterPortable | hipHostRegisterMapped
inline constexpr unsigned kHostRegister = 1 | 2;
// CU_STREAM_WAIT_VALUE_GEQ and _EQ, hipStreamWaitValueGte and hipStreamWaitValueEq
inline constexpr unsigned kWaitAtLeast = 0, kWaitEqual = 1;
// CU_STREAM_WRITE_VALUE_DEFAULT; HIP: flags are reserved
inline constexpr unsigned kWriteDefault = 0;
// CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, hipMemRangeHandleTypeDmaBufFd
inline constexpr int kDmaBufDescriptor = 1;

// CUDA only.
inline constexpr unsigned kCudaHostAlloc = 1 | 2;     // CU_MEMHOSTALLOC_PORTABLE | _DEVICEMAP
inline constexpr unsigned kCudaWaitFlush = 1u << 30;  // CU_STREAM_WAIT_VALUE_FLUSH
inline constexpr int kCudaFlushCurrentContext =
    0;                                         // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
inline constexpr int kCudaFlushToOwner = 100;  // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
inline constexpr int kCudaFlushOptionHost = 1;  // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
inline constexpr int kCudaOldest = 12000;       // cuDriverGetVersion of CUDA 12.0, driver 525

// HIP only.
// hipHostMallocPortable | hipHostMallocMapped | hipHostMallocCoherent
inline constexpr unsigned kHipHostAlloc = 1 | 2 | 0x40000000;
inline constexpr unsigned kHipMallocSignalMemory = 2;  // hipMallocSignalMemory
inline constexpr uint64_t kHipSignalBytes = 8;         // the only size that it is given out in
inline constexpr uint32_t kHipWaitMask = 0xFFFFFFFF;   // all bits count
inline constexpr int kHipOldest = 60000000;            // hipDriverGetVersion of ROCm 6.0

// Device attributes: a CUdevice_attribute and a hipDeviceAttribute_t; -1: the vendor has none.
struct Attribute {
  int cuda;
  int hip;
};
// CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
// hipDeviceAttributeCanUseHostPointerForRegisteredMem
inline constexpr Attribute kSameHostAddresses{91, 4};
// hipDeviceAttributeCanUseStreamWaitValue. CUDA's functions of the second version, _v2, need none.
inline constexpr Attribute kCanWaitOnValue{-1, 10013};
inline constexpr Attribute kCanFlushRemoteWrites{
    98, -1};  // CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
inline constexpr Attribute kGpuDirectRdma{116,
                                          -1};  // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED
// CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS and _WRITES_ORDERING
inline constexpr Attribute kFlushOptions{117, -1}, kWritesOrdering{118, -1};
// CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, hipDeviceAttributeDmaBufSupported
inline constexpr Attribute kDmaBuf{124, 93};
// CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, hipDeviceAttributeHostNumaId
inline constexpr Attribute kHostNumaNode{134, 92};

}  // namespace hetccl::device::abi

#endif  // XLA_FFI_DEVICE_DRIVER_ABI_H_
