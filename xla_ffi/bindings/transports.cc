#include "xla_ffi/bindings/transports.h"

#include <memory>
#include <utility>

#include "xla_ffi/transport/tcp/factory.h"

namespace hetccl::bindings {
namespace {

// What a transport's factory.h offers.
struct Factory {
  const char* name;
  Status (*make_sender)(std::vector<UniqueFd>, std::unique_ptr<transport::Sender>*);
  Status (*make_receiver)(std::vector<UniqueFd>, std::unique_ptr<transport::Receiver>*);
};

constexpr Factory kFactories[] = {
    {"tcp", transport::tcp::MakeSender, transport::tcp::MakeReceiver},
};

}  // namespace

Status AddChannel(Engine& engine, uint32_t local_rank, uint32_t peer_rank, bool outgoing,
                  const std::string& transport, const std::vector<int>& fds) {
  std::vector<UniqueFd> owned;
  for (int fd : fds) owned.emplace_back(fd);
  std::string known;
  for (const Factory& factory : kFactories) {
    known += known.empty() ? "" : ", ";
    known += factory.name;
    if (transport != factory.name) continue;
    if (outgoing) {
      std::unique_ptr<transport::Sender> sender;
      Status status = factory.make_sender(std::move(owned), &sender);
      if (!status.ok()) return status;
      return engine.channels().AddOutgoing(local_rank, peer_rank, std::move(sender));
    }
    std::unique_ptr<transport::Receiver> receiver;
    Status status = factory.make_receiver(std::move(owned), &receiver);
    if (!status.ok()) return status;
    return engine.channels().AddIncoming(local_rank, peer_rank, std::move(receiver));
  }
  return InternalError("unknown transport \"" + transport + "\"; known ones: " + known);
}

}  // namespace hetccl::bindings
