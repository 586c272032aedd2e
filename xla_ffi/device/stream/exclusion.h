// Keeps apart, on one device, what stops for good when it comes together: streams that are held
// until the host has queued something, and driver calls that let nobody else call the driver until
// the device is idle.
#ifndef XLA_FFI_DEVICE_STREAM_EXCLUSION_H_
#define XLA_FFI_DEVICE_STREAM_EXCLUSION_H_

#include <condition_variable>
#include <mutex>

#include "xla_ffi/common/clock.h"

namespace hetccl::device {

// Thread-safe; a leaf: calls nothing under its lock. Several sections may be open at once.
class Exclusion {
 public:
  // A hold is about to be queued. False while a section is open: then it must not be. Each true
  // wants one HoldEnds.
  bool HoldBegins();
  void HoldEnds();

  // From now on no hold begins, until as many Close came as Open. Holds that have begun go on.
  void Open();
  void Close();
  // Waits until no hold is left. False: one still was at the end of the bound.
  bool AwaitNoHold(Duration bound);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  int holds_ = 0;
  int sections_ = 0;
};

// A section, open while this lives. Its owner then waits with AwaitNoHold, on a thread that no
// exchange needs. Waiting ends as long as all processes start their programs in one order: what is
// held now waits for programs that come before whatever the section is for.
class Section {
 public:
  explicit Section(Exclusion* exclusion) : exclusion_(*exclusion) { exclusion_.Open(); }
  ~Section() { exclusion_.Close(); }
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;

 private:
  Exclusion& exclusion_;
};

}  // namespace hetccl::device

#endif  // XLA_FFI_DEVICE_STREAM_EXCLUSION_H_
