// Registrations that nobody uses at the moment and that may be used again.
#ifndef XLA_FFI_TRANSPORT_RDMA_KEPT_REGISTRATIONS_H_
#define XLA_FFI_TRANSPORT_RDMA_KEPT_REGISTRATIONS_H_

#include <cstddef>
#include <list>
#include <map>
#include <tuple>
#include <utility>

#include "xla_ffi/transport/rdma/abi.h"

namespace hetccl::transport::rdma {

// What makes two registrations the same: address, length, and abi::Access.
using RegistrationKey = std::tuple<void*, size_t, int>;

// At most `most`, of which the one that was used longest ago goes first. Bounded by their number
// alone: they pin nothing, and what the kernel and the NIC hold of each are tables, some words for
// each page (policy.h bounds their pages). Owns none of them; used under its owner's lock.
class KeptRegistrations {
 public:
  explicit KeptRegistrations(size_t most) : most_(most) {}

  // Takes it out; null if there is none.
  abi::Mr* Take(const RegistrationKey& key) {
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return nullptr;
    abi::Mr* mr = found->second->second;
    newest_first_.erase(found->second);
    by_key_.erase(found);
    return mr;
  }

  // Puts one in and returns the one that is to be dropped for it, or null: the oldest if they are
  // too many, the one that comes if there is one for this key (two threads made one at once).
  abi::Mr* Put(const RegistrationKey& key, abi::Mr* mr) {
    if (by_key_.count(key) > 0) return mr;
    newest_first_.emplace_front(key, mr);
    by_key_[key] = newest_first_.begin();
    return newest_first_.size() > most_ ? Take(newest_first_.back().first) : nullptr;
  }

  // Takes out any; null if there is none.
  abi::Mr* TakeAny() { return newest_first_.empty() ? nullptr : Take(newest_first_.front().first); }

 private:
  using Entries = std::list<std::pair<RegistrationKey, abi::Mr*>>;

  const size_t most_;
  Entries newest_first_;
  std::map<RegistrationKey, Entries::iterator> by_key_;
};

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_KEPT_REGISTRATIONS_H_
