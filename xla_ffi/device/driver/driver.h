// A vendor's GPU driver in this process.
#ifndef XLA_FFI_DEVICE_DRIVER_DRIVER_H_
#define XLA_FFI_DEVICE_DRIVER_DRIVER_H_

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "xla_ffi/common/status.h"
#include "xla_ffi/device/driver/table.h"
#include "xla_ffi/device/driver/types.h"

namespace hetccl::device {

class Gpu;

// The loaded and initialised driver. Thread-safe. Drivers and the devices that they hand out live
// until the process ends: threads of XLA may hold them at any time, and drivers are not made to be
// unloaded.
class Driver {
 public:
  // The driver of this vendor, loaded at the first call. `library` names the file (an absolute path
  // or a name for the dynamic loader); empty: the vendor's usual names. Calls with the same
  // arguments give the same driver; a failure is tried again by the next call. A machine without
  // a device is no error here: device_count() is 0.
  static Status Get(Vendor vendor, const std::string& library, const Driver** driver);

  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  Vendor vendor() const { return table_.vendor; }
  const Table& table() const { return table_; }
  // As the driver tells it: CUDA 1000 * major + 10 * minor, HIP 10000000 * major + 100000 * minor +
  // patch. 0 if there is no device.
  int version() const { return version_; }
  int device_count() const { return device_count_; }

  // The device with this ordinal (the process's own numbering, after CUDA_VISIBLE_DEVICES and the
  // like), opened at the first call: its primary context, the one that XLA uses, is retained.
  Status Open(int ordinal, const Gpu** gpu) const;

  // The device whose context is current on the calling thread, as on XLA's threads.
  Status OpenCurrent(const Gpu** gpu) const;

  // The driver's own words for an error code: "CUDA_ERROR_INVALID_VALUE: invalid argument".
  std::string Describe(int code) const;

 private:
  Driver() = default;

  Status Initialise();

  Table table_;
  int version_ = 0;
  int device_count_ = 0;
  std::string no_device_;  // why there is none
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Gpu>> gpus_;  // by ordinal; guarded by mutex_
};

}  // namespace hetccl::device

#endif  // XLA_FFI_DEVICE_DRIVER_DRIVER_H_
