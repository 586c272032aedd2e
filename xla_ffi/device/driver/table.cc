#include "xla_ffi/device/driver/table.h"

#include <dlfcn.h>

#include <vector>

namespace hetccl::device {
namespace {

const char* Oldest(Vendor vendor) {
  return vendor == Vendor::kCuda ? "CUDA 12, NVIDIA driver 525 or newer" : "ROCm 6.0 or newer";
}

// Newest first; the name without a version, which only development packages bring, last.
std::vector<const char*> UsualNames(Vendor vendor) {
  if (vendor == Vendor::kCuda) return {"libcuda.so.1"};
  return {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"};
}

// A library that XLA's plugin has loaded already comes first: two versions of one driver in a
// process do not know each other's streams.
void* OpenLibrary(Vendor vendor, const std::string& library, std::string* opened,
                  std::string* reasons) {
  const std::vector<const char*> names =
      library.empty() ? UsualNames(vendor) : std::vector<const char*>{library.c_str()};
  for (int loaded : {RTLD_NOLOAD, 0}) {
    for (const char* name : names) {
      *opened = name;
      if (void* handle = ::dlopen(name, RTLD_NOW | RTLD_LOCAL | loaded)) return handle;
      if (loaded != 0) continue;
      const char* reason = ::dlerror();
      if (!reasons->empty()) *reasons += "; ";
      *reasons += reason != nullptr ? reason : name;
    }
  }
  return nullptr;
}

// Looks the symbols of one vendor up, and remembers which are not there.
class Binder {
 public:
  Binder(void* handle, Vendor vendor) : handle_(handle), vendor_(vendor) {}

  // A null name: the vendor has no such function, and nothing calls it there.
  template <typename... Args>
  void Needed(Entry<Args...>* entry, const char* cuda, const char* hip) {
    Bind(entry, cuda, hip, &needed_);
  }
  // Not all drivers have it; its absence is a capability that the device lacks.
  template <typename... Args>
  void Optional(Entry<Args...>* entry, const char* cuda, const char* hip) {
    Bind(entry, cuda, hip, &optional_);
  }
  template <typename Result, typename... Args>
  void NeededText(Result (**function)(Args...), const char* hip) {
    if (vendor_ == Vendor::kHip) Look(hip, function, &needed_);
  }

  const std::string& missing_needed() const { return needed_; }
  const std::string& missing_optional() const { return optional_; }

 private:
  template <typename... Args>
  void Bind(Entry<Args...>* entry, const char* cuda, const char* hip, std::string* missing) {
    entry->name = vendor_ == Vendor::kCuda ? cuda : hip;
    if (entry->name != nullptr) Look(entry->name, &entry->call, missing);
  }

  template <typename Function>
  void Look(const char* name, Function** function, std::string* missing) {
    *function = reinterpret_cast<Function*>(::dlsym(handle_, name));
    if (*function != nullptr) return;
    if (!missing->empty()) *missing += ", ";
    *missing += name;
  }

  void* const handle_;
  const Vendor vendor_;
  std::string needed_;
  std::string optional_;
};

// The names are those that the libraries export: cuda.h turns cuStreamDestroy and the like into
// names with _v2 by macros, and without _ptsz the null stream is the legacy default stream.
void BindDevices(Binder& bind, Table* table) {
  bind.Needed(&table->Init, "cuInit", "hipInit");
  bind.Needed(&table->DriverGetVersion, "cuDriverGetVersion", "hipDriverGetVersion");
  bind.Needed(&table->GetErrorName, "cuGetErrorName", nullptr);
  bind.Needed(&table->GetErrorString, "cuGetErrorString", nullptr);
  bind.NeededText(&table->HipGetErrorName, "hipGetErrorName");
  bind.NeededText(&table->HipGetErrorString, "hipGetErrorString");
  bind.Needed(&table->GetLastError, nullptr, "hipGetLastError");
  bind.Needed(&table->DeviceGetCount, "cuDeviceGetCount", "hipGetDeviceCount");
  bind.Needed(&table->DeviceGet, "cuDeviceGet", "hipDeviceGet");
  bind.Needed(&table->DeviceGetAttribute, "cuDeviceGetAttribute", "hipDeviceGetAttribute");
  bind.Needed(&table->DeviceGetName, "cuDeviceGetName", "hipDeviceGetName");
  bind.Needed(&table->DeviceGetPCIBusId, "cuDeviceGetPCIBusId", "hipDeviceGetPCIBusId");
  bind.Needed(&table->CurrentDevice, "cuCtxGetDevice", "hipGetDevice");
  bind.Needed(&table->SetDevice, nullptr, "hipSetDevice");
  bind.Needed(&table->DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", nullptr);
  bind.Needed(&table->CtxSetCurrent, "cuCtxSetCurrent", nullptr);
  bind.Needed(&table->CtxPushCurrent, "cuCtxPushCurrent_v2", nullptr);
  bind.Needed(&table->CtxPopCurrent, "cuCtxPopCurrent_v2", nullptr);
}

void BindStreams(Binder& bind, Table* table) {
  bind.Needed(&table->GetStreamPriorityRange, "cuCtxGetStreamPriorityRange",
              "hipDeviceGetStreamPriorityRange");
  bind.Needed(&table->StreamCreateWithPriority, "cuStreamCreateWithPriority",
              "hipStreamCreateWithPriority");
  bind.Needed(&table->StreamDestroy, "cuStreamDestroy_v2", "hipStreamDestroy");
  bind.Needed(&table->StreamQuery, "cuStreamQuery", "hipStreamQuery");
  bind.Needed(&table->StreamSynchronize, "cuStreamSynchronize", "hipStreamSynchronize");
  bind.Needed(&table->EventCreate, "cuEventCreate", "hipEventCreateWithFlags");
  bind.Needed(&table->EventRecord, "cuEventRecord", "hipEventRecord");
  bind.Needed(&table->EventQuery, "cuEventQuery", "hipEventQuery");
  // CUDA 11.7; ROCm 4.2.
  bind.Optional(&table->StreamWaitValue32, "cuStreamWaitValue32_v2", nullptr);
  bind.Optional(&table->StreamWaitValue32Masked, nullptr, "hipStreamWaitValue32");
  bind.Optional(&table->StreamWriteValue32, "cuStreamWriteValue32_v2", "hipStreamWriteValue32");
  bind.Optional(&table->LaunchHostFunc, "cuLaunchHostFunc", "hipLaunchHostFunc");
}

void BindMemory(Binder& bind, Table* table) {
  bind.Needed(&table->MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync");
  bind.Needed(&table->MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync");
  bind.Needed(&table->MemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync");
  bind.Needed(&table->MemsetD8Async, "cuMemsetD8Async", "hipMemsetD8Async");
  bind.Needed(&table->MemsetD32Async, "cuMemsetD32Async", "hipMemsetD32Async");
  bind.Needed(&table->MemAlloc, "cuMemAlloc_v2", "hipMalloc");
  bind.Needed(&table->MemFree, "cuMemFree_v2", "hipFree");
  bind.Needed(&table->MemHostAlloc, "cuMemHostAlloc", "hipHostMalloc");
  bind.Needed(&table->MemFreeHost, "cuMemFreeHost", "hipHostFree");
  bind.Needed(&table->MemHostRegister, "cuMemHostRegister_v2", "hipHostRegister");
  bind.Needed(&table->MemHostUnregister, "cuMemHostUnregister", "hipHostUnregister");
  bind.Needed(&table->MemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2",
              "hipHostGetDevicePointer");
  bind.Needed(&table->MallocWithFlags, nullptr, "hipExtMallocWithFlags");
  // CUDA 11.7; ROCm 7.0, before that HSA's, which libamdhip64 is linked with.
  bind.Optional(&table->MemGetHandleForAddressRange, "cuMemGetHandleForAddressRange",
                "hipMemGetHandleForAddressRange");
  bind.Optional(&table->ExportDmaBuf, nullptr, "hsa_amd_portable_export_dmabuf");
  bind.Optional(&table->FlushGPUDirectRDMAWrites, "cuFlushGPUDirectRDMAWrites", nullptr);
}

}  // namespace

const char* PlatformName(Vendor vendor) { return vendor == Vendor::kCuda ? "CUDA" : "ROCm"; }

Status LoadTable(Vendor vendor, const std::string& library, Table* table) {
  *table = Table();
  table->vendor = vendor;
  std::string reasons;
  void* handle = OpenLibrary(vendor, library, &table->library, &reasons);
  if (handle == nullptr) {
    return InternalError(std::string("no ") + PlatformName(vendor) + " driver (" + Oldest(vendor) +
                         ", is needed): " + reasons);
  }
  Binder bind(handle, vendor);
  BindDevices(bind, table);
  BindStreams(bind, table);
  BindMemory(bind, table);
  table->missing = bind.missing_optional();
  if (!bind.missing_needed().empty()) {
    return InternalError(table->library + " lacks " + bind.missing_needed() + " (" +
                         Oldest(vendor) + ", is needed)");
  }
  return Status();
}

}  // namespace hetccl::device
