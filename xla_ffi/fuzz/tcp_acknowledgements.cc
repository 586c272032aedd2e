// What comes back to the sender of a tcp channel: acknowledgements, a goodbye, anything.
#include "xla_ffi/fuzz/input.h"
#include "xla_ffi/transport/tcp/factory.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace hetccl;
  using transport::PeerState;
  fuzz::Input input(data, size);
  auto [here, there] = fuzz::SocketPair();
  std::vector<UniqueFd> sockets;
  sockets.push_back(std::move(here));
  std::unique_ptr<transport::Sender> sender;
  fuzz::Require(transport::tcp::MakeSender(std::move(sockets), fuzz::Host(), {}, {}, &sender).ok());
  static const auto* payload = new std::vector<std::byte>(4 << 20);  // more than the socket takes
  transport::WireHeader header = transport::MakeHeader(transport::MessageType::kData);
  header.payload_bytes = payload->size();
  sender->Begin(header, {{payload->data(), payload->size()}});
  transport::Progress progress;
  while (input.size() > 0 && sender->peer() == PeerState::kAlive) {
    fuzz::Say(there, input.Take(1 + input.Byte() % 64));
    fuzz::Require(sender->Step(&progress).ok() && !progress.done);
    (void)sender->peer_has_begun();
  }
  there = UniqueFd();
  fuzz::Require(sender->Step(&progress).ok() && !progress.done);
  fuzz::Require(sender->peer() != PeerState::kAlive);
  sender->SayGoodbye();
  return 0;
}
