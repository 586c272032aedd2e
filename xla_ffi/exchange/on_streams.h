// Exchanges of GPUs between their start and their done.
#ifndef XLA_FFI_EXCHANGE_ON_STREAMS_H_
#define XLA_FFI_EXCHANGE_ON_STREAMS_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "xla_ffi/exchange/exchange.h"
#include "xla_ffi/exchange/plan.h"

namespace hetccl {

// A ticket in device memory cannot be read, so done finds its exchange by device, plan and buffers.
// Thread-safe. Asks exchanges under its lock whether they are complete.
class OnStreams {
 public:
  using Buffers = std::vector<BufferView>;

  // Starting with these buffers shows which programs died before their done: two exchanges that are
  // alive may send one buffer, and share none otherwise. Forgets theirs; returns one that still
  // moves, if there is any.
  std::shared_ptr<Exchange> DropDead(int device, const Buffers& sends, const Buffers& receives);
  void Add(int device, std::shared_ptr<Exchange> exchange, Buffers sends, Buffers receives);
  // Hands out, once, the oldest exchange of this plan with these buffers, or the oldest of this
  // plan if none has them (then the buffers were moved). Null: there is none.
  std::shared_ptr<Exchange> Take(int device, uint64_t plan,
                                 const std::vector<const void*>& receives,
                                 const std::vector<const void*>& sends);

 private:
  struct Started {
    std::shared_ptr<Exchange> exchange;
    Buffers sends;
    Buffers receives;
  };

  std::mutex mutex_;
  // By device ordinal and plan, oldest first, none empty; guarded by mutex_.
  std::map<int, std::map<uint64_t, std::deque<Started>>> started_;
};

}  // namespace hetccl

#endif  // XLA_FFI_EXCHANGE_ON_STREAMS_H_
