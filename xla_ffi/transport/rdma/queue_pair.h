// One reliable connection: a queue pair with its completion queue.
#ifndef XLA_FFI_TRANSPORT_RDMA_QUEUE_PAIR_H_
#define XLA_FFI_TRANSPORT_RDMA_QUEUE_PAIR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "xla_ffi/common/status.h"
#include "xla_ffi/transport/rdma/device.h"
#include "xla_ffi/transport/rdma/options.h"
#include "xla_ffi/transport/rdma/wire.h"

namespace hetccl::transport::rdma {

// What has ended: one of this side's writes, in their order, or an immediate of the peer's.
struct Completion {
  bool receive;
  uint32_t immediate;  // of a receive
  uint64_t writes;     // that have ended with this one, else
};

struct Write {
  const void* from;
  uint32_t lkey;
  size_t bytes;
  uint64_t to;
  uint32_t rkey;
  bool has_immediate = false;
  uint32_t immediate = 0;
  // Whether its end is told by itself, and not only with that of a later one.
  bool told = true;
};

// Used by one thread at a time. The completion queue is the channel's own: its completions never
// cross threads, whichever proxy thread has the channel, and one that has many polls each of them
// with a read of memory.
class QueuePair {
 public:
  struct Depths {
    uint32_t writes;
    uint32_t receives;
  };
  // Makes one on this port, in the state INIT, and writes into the record what the peer must know
  // of it. An error names device, port, and reason.
  static Status Make(std::shared_ptr<Device> device, const Options& options, const Depths& depths,
                     EndpointRecord* mine, std::unique_ptr<QueuePair>* out);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  // Moves it to RTS, connected with the peer.
  Status Connect(const EndpointRecord& mine, const EndpointRecord& theirs);

  // Requires room() > 0. The memory must stay until the write has completed, unless it is at most
  // inline_bytes().
  Status Post(const Write& write);
  size_t room() const { return depths_.writes - writes(); }
  size_t inline_bytes() const { return inline_bytes_; }
  Status PostReceives(uint32_t count);

  // Appends what has ended. An error names device and reason, and stays: nothing moves any more.
  Status Poll(std::vector<Completion>* completions);
  bool failed() const { return !error_.ok(); }
  // Makes fd() readable at the next completion, once.
  Status Arm();
  // Takes one such event back; false if there was none.
  bool ReadEvent();
  int fd() const { return channel_->fd; }

  // Gives up: the NIC ends what it was told, in error, and takes nothing of the peer's any more.
  void Stop();
  // Whether the NIC has nothing left to do, neither here nor for the peer. After Stop; polls.
  bool Drained();
  // Writes that have not completed.
  size_t writes() const { return static_cast<size_t>(posted_ - ended_); }
  // "rdma rxe0 port 1"
  const std::string& where() const { return where_; }

 private:
  QueuePair(std::shared_ptr<Device> device, const Options& options, const Depths& depths);
  Status Create();
  Status Initialize();
  // Counts what has ended, and says how many writes that were; true if it was a receive.
  bool Count(const abi::Wc& wc, uint64_t* writes);

  const std::shared_ptr<Device> device_;
  const Options options_;
  const Depths depths_;
  const std::string where_;
  abi::CompChannel* channel_ = nullptr;
  abi::Cq* cq_ = nullptr;
  abi::Qp* qp_ = nullptr;
  size_t inline_bytes_ = 0;
  uint64_t posted_ = 0;  // writes
  uint64_t ended_ = 0;
  size_t receives_ = 0;
  bool stopped_ = false;
  Status error_;
};

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_QUEUE_PAIR_H_
