// An opened RDMA device and the memory registered with it.
#ifndef XLA_FFI_TRANSPORT_RDMA_DEVICE_H_
#define XLA_FFI_TRANSPORT_RDMA_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "xla_ffi/common/status.h"
#include "xla_ffi/transport/rdma/verbs.h"

namespace hetccl::transport::rdma {

class Device;

// Memory that the NIC may touch until the object is gone. Keeps the device.
class Registration {
 public:
  Registration(std::shared_ptr<Device> device, abi::Mr* mr);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  uint32_t lkey() const { return mr_->lkey; }
  uint32_t rkey() const { return mr_->rkey; }

 private:
  const std::shared_ptr<Device> device_;
  abi::Mr* const mr_;
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

  // Registers memory with `access` (abi::Access). Who asks for the same while it is registered
  // shares it; when the last one lets go it is gone, because memory that is freed and mapped anew
  // under a registration that is kept would be another memory for the NIC than for the CPU. So the
  // caller holds it no longer than it owns the memory.
  Status Register(void* data, size_t bytes, int access,
                  std::shared_ptr<Registration>* registration);
  // Registers a dma-buf: `bytes` from `offset` on, known to the peer as addresses from `iova` on.
  Status RegisterDmabuf(int fd, uint64_t offset, size_t bytes, uint64_t iova, int access,
                        std::shared_ptr<Registration>* registration);
  // Registrations made so far, shared ones counted once.
  uint64_t registrations() const;

 private:
  using Key = std::tuple<void*, size_t, int>;

  const Verbs& verbs_;
  abi::Context* const context_;
  abi::Pd* const pd_;
  const std::string name_;
  mutable std::mutex mutex_;
  std::map<Key, std::weak_ptr<Registration>> shared_;  // guarded by mutex_
  uint64_t registrations_ = 0;                         // guarded by mutex_
};

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_DEVICE_H_
