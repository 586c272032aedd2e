// A NIC that only registers memory, for tests of who registers what and when.
#ifndef XLA_FFI_TRANSPORT_RDMA_TEST_FAKE_NIC_H_
#define XLA_FFI_TRANSPORT_RDMA_TEST_FAKE_NIC_H_

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "xla_ffi/transport/rdma/device.h"

namespace hetccl::transport::rdma {

// One at a time, since verbs are plain functions.
class FakeNic {
 public:
  FakeNic() {
    current = this;
    verbs_.reg_mr = [](abi::Pd*, void* data, size_t bytes, int access) -> abi::Mr* {
      if ((access & abi::kAccessOnDemand) != 0 && !current->pages_on_demand_) {
        errno = EOPNOTSUPP;
        return nullptr;
      }
      return current->Add(data, bytes);
    };
    verbs_.dereg_mr = [](abi::Mr* mr) {
      current->Remove(mr);
      return 0;
    };
    verbs_.reg_dmabuf_mr = [](abi::Pd*, uint64_t, size_t bytes, uint64_t iova, int, int) {
      errno = EOPNOTSUPP;
      return current->takes_dmabufs_ ? current->Add(reinterpret_cast<void*>(iova), bytes) : nullptr;
    };
    verbs_.alloc_pd = [](abi::Context*) { return &current->pd_; };
    verbs_.dealloc_pd = [](abi::Pd*) { return 0; };
    verbs_.close_device = [](abi::Context*) { return 0; };
    extended_.query_device_ex = [](abi::Context*, const void*, abi::DeviceAttrEx* attr, size_t) {
      attr->odp_caps = current->odp_caps_;
      return 0;
    };
    extended_.size = sizeof(extended_);
    extended_.context.abi_compat = reinterpret_cast<void*>(abi::kExtended);
    device_ = std::make_shared<Device>(verbs_, &extended_.context, &pd_, "fake0");
  }
  ~FakeNic() {
    device_.reset();
    current = nullptr;
  }

  const std::shared_ptr<Device>& device() const { return device_; }
  size_t registered() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return registered_.size();
  }
  void DropDevice() { device_.reset(); }
  // Registrations larger than this fail, as beyond the limit of locked memory.
  void set_limit(size_t bytes) { limit_ = bytes; }
  void set_takes_dmabufs(bool takes) { takes_dmabufs_ = takes; }
  // Whether registrations with on-demand paging work, and what the device says of it.
  void set_pages_on_demand(bool pages) { pages_on_demand_ = pages; }
  void set_odp_caps(uint64_t general, uint32_t rc) { odp_caps_ = {general, rc, 0, 0}; }
  abi::ExtendedContext& extended() { return extended_; }

 private:
  static inline FakeNic* current = nullptr;

  abi::Mr* Add(void* data, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (bytes > limit_) {
      errno = ENOMEM;
      return nullptr;
    }
    auto mr = std::make_unique<abi::Mr>();
    mr->addr = data;
    mr->length = bytes;
    mr->lkey = mr->rkey = ++keys_;
    abi::Mr* raw = mr.get();
    registered_[raw] = std::move(mr);
    return raw;
  }
  void Remove(abi::Mr* mr) {
    std::lock_guard<std::mutex> lock(mutex_);
    registered_.erase(mr);
  }

  Verbs verbs_ = {};
  abi::Pd pd_ = {};
  abi::ExtendedContext extended_ = {};
  abi::OdpCaps odp_caps_ = {abi::kOdpSupport, abi::kOdpSupportWrite, 0, 0};
  bool pages_on_demand_ = true;
  std::shared_ptr<Device> device_;
  mutable std::mutex mutex_;
  std::map<abi::Mr*, std::unique_ptr<abi::Mr>> registered_;  // guarded by mutex_
  uint32_t keys_ = 0;                                        // guarded by mutex_
  size_t limit_ = SIZE_MAX;
  bool takes_dmabufs_ = false;
};

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_TEST_FAKE_NIC_H_
