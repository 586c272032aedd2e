#include "xla_ffi/device/driver/driver.h"

#include <map>
#include <utility>

#include "xla_ffi/device/driver/abi.h"
#include "xla_ffi/device/driver/gpu.h"

namespace hetccl::device {
namespace {

// "12.4" of 12040, "6.3" of 60342134.
std::string VersionText(Vendor vendor, int version) {
  const int major = vendor == Vendor::kCuda ? version / 1000 : version / 10000000;
  const int minor = vendor == Vendor::kCuda ? version % 1000 / 10 : version % 10000000 / 100000;
  return std::to_string(major) + "." + std::to_string(minor);
}

Status CheckVersion(const Table& table, int version) {
  const bool cuda = table.vendor == Vendor::kCuda;
  if (version >= (cuda ? abi::kCudaOldest : abi::kHipOldest)) return Status();
  return InternalError(table.library + " is of " + PlatformName(table.vendor) + " " +
                       VersionText(table.vendor, version) + "; " +
                       (cuda ? "CUDA 12.0 (NVIDIA driver 525)" : "ROCm 6.0") +
                       " or newer is needed");
}

}  // namespace

Status Driver::Get(Vendor vendor, const std::string& library, const Driver** driver) {
  // Leaked on purpose, with the drivers in it: other threads may use them while the process ends.
  static auto* const mutex = new std::mutex;
  static auto* const drivers = new std::map<std::pair<Vendor, std::string>, Driver*>;
  std::lock_guard<std::mutex> lock(*mutex);
  Driver*& known = (*drivers)[{vendor, library}];
  if (known == nullptr) {
    std::unique_ptr<Driver> fresh(new Driver);
    if (Status status = LoadTable(vendor, library, &fresh->table_); !status.ok()) return status;
    if (Status status = fresh->Initialise(); !status.ok()) return status;
    known = fresh.release();
  }
  *driver = known;
  return Status();
}

Status Driver::Initialise() {
  const char* call = table_.Init.name;
  int code = table_.Init.call(0);
  if (code == abi::kSuccess) {
    call = table_.DriverGetVersion.name;
    code = table_.DriverGetVersion.call(&version_);
    if (code == abi::kSuccess) {
      if (Status status = CheckVersion(table_, version_); !status.ok()) return status;
      call = table_.DeviceGetCount.name;
      code = table_.DeviceGetCount.call(&device_count_);
    }
  }
  const std::string outcome = std::string(call) + " says " + Describe(code);
  // ROCm 5 says "invalid device" where there is none.
  if (code == abi::kNoDevice || code == abi::kInvalidDevice ||
      (code == abi::kSuccess && device_count_ == 0)) {
    version_ = device_count_ = 0;
    no_device_ = table_.library + " finds no " + PlatformName(vendor()) + " device: " + outcome;
    return Status();
  }
  if (code != abi::kSuccess) return InternalError(table_.library + ": " + outcome);
  gpus_.resize(static_cast<size_t>(device_count_));
  return Status();
}

Status Driver::Open(int ordinal, const Gpu** gpu) const {
  if (device_count_ == 0) return InternalError(no_device_);
  if (ordinal < 0 || ordinal >= device_count_) {
    return InternalError("no " + std::string(PlatformName(vendor())) + " device " +
                         std::to_string(ordinal) + ": " + table_.library + " has " +
                         std::to_string(device_count_) + " (0 to " +
                         std::to_string(device_count_ - 1) + ")");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<Gpu>& known = gpus_[static_cast<size_t>(ordinal)];
  if (known == nullptr) {
    std::unique_ptr<Gpu> fresh(new Gpu(*this, ordinal));
    if (Status status = fresh->Initialise(); !status.ok()) return status;
    known = std::move(fresh);
  }
  *gpu = known.get();
  return Status();
}

Status Driver::OpenCurrent(const Gpu** gpu) const {
  if (device_count_ == 0) return InternalError(no_device_);
  int current = 0;
  if (int code = table_.CurrentDevice.call(&current); code != abi::kSuccess) {
    return InternalError(std::string(table_.CurrentDevice.name) +
                         " on this thread: " + Describe(code));
  }
  for (int ordinal = 0; ordinal < device_count_; ++ordinal) {
    int device = 0;
    if (table_.DeviceGet.call(&device, ordinal) == abi::kSuccess && device == current) {
      return Open(ordinal, gpu);
    }
  }
  return InternalError("the current device of this thread is none of the process's " +
                       std::to_string(device_count_));
}

std::string Driver::Describe(int code) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (vendor() == Vendor::kCuda) {
    if (table_.GetErrorName.call(code, &name) != abi::kSuccess) name = nullptr;
    if (table_.GetErrorString.call(code, &text) != abi::kSuccess) text = nullptr;
  } else {
    name = table_.HipGetErrorName(code);
    text = table_.HipGetErrorString(code);
  }
  if (name == nullptr) return "error " + std::to_string(code);
  return text == nullptr ? name : std::string(name) + ": " + text;
}

}  // namespace hetccl::device
