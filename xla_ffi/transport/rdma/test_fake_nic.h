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
    verbs_.reg_mr = [](abi::Pd*, void* data, size_t bytes, int) {
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
    verbs_.dealloc_pd = [](abi::Pd*) { return 0; };
    verbs_.close_device = [](abi::Context*) { return 0; };
    device_ = std::make_shared<Device>(verbs_, nullptr, nullptr, "fake0");
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
  // Registrations larger than this fail, as beyond the limit of locked memory.
  void set_limit(size_t bytes) { limit_ = bytes; }
  void set_takes_dmabufs(bool takes) { takes_dmabufs_ = takes; }

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
  std::shared_ptr<Device> device_;
  mutable std::mutex mutex_;
  std::map<abi::Mr*, std::unique_ptr<abi::Mr>> registered_;  // guarded by mutex_
  uint32_t keys_ = 0;                                        // guarded by mutex_
  size_t limit_ = SIZE_MAX;
  bool takes_dmabufs_ = false;
};

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_TEST_FAKE_NIC_H_
