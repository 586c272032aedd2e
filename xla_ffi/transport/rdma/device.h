// An opened RDMA device and the memory registered with it.
#ifndef XLA_FFI_TRANSPORT_RDMA_DEVICE_H_
#define XLA_FFI_TRANSPORT_RDMA_DEVICE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "xla_ffi/common/status.h"
#include "xla_ffi/transport/rdma/kept_registrations.h"
#include "xla_ffi/transport/rdma/verbs.h"

namespace hetccl::transport::rdma {

class Device;

// Memory that the NIC may touch until the object is gone. Keeps the device.
class Registration {
 public:
  Registration(std::shared_ptr<Device> device, abi::Mr* mr, int access);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  uint32_t lkey() const { return mr_->lkey; }
  uint32_t rkey() const { return mr_->rkey; }
  // It is gone with its last user, also if it is one that stays else. Any thread.
  void DoNotKeep() { keep_.store(false, std::memory_order_relaxed); }

 private:
  const std::shared_ptr<Device> device_;
  abi::Mr* const mr_;
  const int access_;
  std::atomic<bool> keep_;
};

// Thread-safe. One for each device and process, shared by all channels.
class Device : public std::enable_shared_from_this<Device> {
 public:
  // The device of this name, opened if nobody else has it open.
  static Status Open(const std::string& name, std::shared_ptr<Device>* device);
  // Takes ownership of the context; for tests.
  Device(const Verbs& verbs, abi::Context* context, abi::Pd* pd, std::string name);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Verbs& verbs() const { return verbs_; }
  abi::Context* context() const { return context_; }
  abi::Pd* pd() const { return pd_; }
  const std::string& name() const { return name_; }

  // What `ask` says: why abi::kAccessOnDemand is not to be used with this device, or nothing. Asks
  // at the first call alone, whoever calls; the others wait for it.
  const std::string& WhyNotOnDemand(const std::function<std::string()>& ask);

  // Registers memory with `access` (abi::Access). Who asks for the same while it is registered
  // shares it; when the last one lets go it is gone, because memory that is freed and mapped anew
  // under a registration that is kept would be another memory for the NIC than for the CPU. So the
  // caller holds it no longer than it owns the memory. With abi::kAccessOnDemand the NIC follows
  // the page tables, a registration holds for whatever is mapped there next, and the kMostKept last
  // used ones stay for whoever asks again.
  Status Register(void* data, size_t bytes, int access,
                  std::shared_ptr<Registration>* registration);
  // Registers a dma-buf: `bytes` from `offset` on, known to the peer as addresses from `iova` on.
  Status RegisterDmabuf(int fd, uint64_t offset, size_t bytes, uint64_t iova, int access,
                        std::shared_ptr<Registration>* registration);
  // Registrations made so far, those that were shared or kept counted once.
  uint64_t registrations() const;

  // 16 GB in pieces of the largest size.
  static constexpr size_t kMostKept = 1024;

 private:
  friend class Registration;

  void Keep(abi::Mr* mr, int access);

  const Verbs& verbs_;
  abi::Context* const context_;
  abi::Pd* const pd_;
  const std::string name_;
  std::once_flag asked_on_demand_;
  std::string why_not_on_demand_;
  mutable std::mutex mutex_;
  std::map<RegistrationKey, std::weak_ptr<Registration>> shared_;  // guarded by mutex_
  KeptRegistrations kept_{kMostKept};                              // guarded by mutex_
  uint64_t registrations_ = 0;                                     // guarded by mutex_
};

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_DEVICE_H_
