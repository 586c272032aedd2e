// A payload's memory, registered piece by piece as it is needed.
#ifndef XLA_FFI_TRANSPORT_RDMA_REGISTERED_SPANS_H_
#define XLA_FFI_TRANSPORT_RDMA_REGISTERED_SPANS_H_

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "xla_ffi/common/status.h"
#include "xla_ffi/transport/rdma/device.h"
#include "xla_ffi/transport/rdma/policy.h"

namespace hetccl::transport::rdma {

// Holds the registrations of one message until Release. Used by one thread at a time.
class RegisteredSpans {
 public:
  // What the NIC may do with the memory: abi::Access.
  void Make(std::shared_ptr<Device> device, int access) {
    device_ = std::move(device);
    access_ = access;
  }
  // Makes sure that memory at the begin of the span is registered, and says how many bytes of it.
  Status Cover(const void* data, size_t size, size_t* bytes, const Registration** registration) {
    auto* at = static_cast<std::byte*>(const_cast<void*>(data));
    if (at < begin_ || at >= end_) {
      const size_t piece = std::min(size, kRegisterBytes);
      std::shared_ptr<Registration> made;
      Status status = device_->Register(at, piece, access_, &made);
      if (!status.ok()) return status;
      registrations_.push_back(std::move(made));
      begin_ = at;
      end_ = at + piece;
    }
    *bytes = std::min(size, static_cast<size_t>(end_ - at));
    *registration = registrations_.back().get();
    return Status();
  }
  void Release() {
    registrations_.clear();
    begin_ = end_ = nullptr;
  }

  // The same for a message that was given up: whatever may still be under way from or into this
  // memory is not to find it any more.
  void Abandon() {
    for (const auto& registration : registrations_) registration->DoNotKeep();
    Release();
  }

 private:
  std::shared_ptr<Device> device_;
  int access_ = 0;
  std::vector<std::shared_ptr<Registration>> registrations_;
  // The last one's memory.
  std::byte* begin_ = nullptr;
  std::byte* end_ = nullptr;
};

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_REGISTERED_SPANS_H_
