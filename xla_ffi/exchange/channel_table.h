// All channels of an engine.
#ifndef XLA_FFI_EXCHANGE_CHANNEL_TABLE_H_
#define XLA_FFI_EXCHANGE_CHANNEL_TABLE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/common/status.h"
#include "xla_ffi/exchange/channel.h"
#include "xla_ffi/exchange/incoming.h"
#include "xla_ffi/exchange/outgoing.h"
#include "xla_ffi/proxy/proxy.h"

namespace hetccl {

// Thread-safe. Owns the proxy threads and gives each channel to the one with the least channels; a
// pair's two directions thus run on different threads where there is more than one.
class ChannelTable {
 public:
  ChannelTable(std::shared_ptr<ChannelContext> context, int proxy_threads, Duration spin);

  // Errors: the channel exists already.
  Status AddOutgoing(uint32_t local_rank, uint32_t peer_rank,
                     std::unique_ptr<transport::Sender> sender);
  Status AddIncoming(uint32_t local_rank, uint32_t peer_rank,
                     std::unique_ptr<transport::Receiver> receiver);

  // Null if there is no such channel.
  std::shared_ptr<OutgoingChannel> Outgoing(uint32_t local_rank, uint32_t peer_rank) const;
  // Makes an unconnected one if there is none: the peer may connect later.
  std::shared_ptr<IncomingChannel> Incoming(uint32_t local_rank, uint32_t peer_rank);

  std::vector<std::shared_ptr<Channel>> All() const;
  std::vector<std::shared_ptr<OutgoingChannel>> AllOutgoing() const;
  std::vector<std::shared_ptr<IncomingChannel>> AllIncoming() const;
  int proxy_threads() const { return static_cast<int>(proxies_.size()); }

  // Ends the proxy threads, says goodbye on every channel and waits, bounded, until what was sent
  // has left this process. Requires that all channels have failed or are idle. Returns the number
  // of threads that did not end in time.
  int Shutdown(TimePoint deadline);

 private:
  using Key = std::pair<uint32_t, uint32_t>;  // local rank, peer rank

  void Start(const std::shared_ptr<Channel>& channel);
  std::string OperationWith(uint32_t peer_rank) const;

  const std::shared_ptr<ChannelContext> context_;
  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::map<Key, std::shared_ptr<OutgoingChannel>> outgoing_;
  std::map<Key, std::shared_ptr<IncomingChannel>> incoming_;
  size_t next_proxy_ = 0;
  bool shut_down_ = false;

  std::vector<std::unique_ptr<proxy::Proxy>> proxies_;  // constant until Shutdown
};

}  // namespace hetccl

#endif  // XLA_FFI_EXCHANGE_CHANNEL_TABLE_H_
