// What comes over the sockets of a tcp channel, one to three of them: headers and payloads.
#include "xla_ffi/fuzz/input.h"
#include "xla_ffi/transport/tcp/factory.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace hetccl;
  fuzz::Input input(data, size);
  const unsigned shape = input.Byte();
  const size_t lanes = 1 + shape % 3;
  const bool checksum = shape >= 128;
  std::vector<UniqueFd> here, there;
  for (size_t i = 0; i < lanes; ++i) {
    auto [a, b] = fuzz::SocketPair();
    here.push_back(std::move(a));
    there.push_back(std::move(b));
  }
  std::unique_ptr<transport::Receiver> receiver;
  fuzz::Require(
      transport::tcp::MakeReceiver(std::move(here), fuzz::Host(), {}, {checksum}, &receiver).ok());
  // The further sockets get the end of the input; what the first one gets comes in two parts.
  const size_t share = input.size() / (2 * lanes);
  const auto first = input.Take(input.size() / 4);
  const auto second = input.Take(input.size() - share * (lanes - 1));
  fuzz::Say(there[0], first);
  fuzz::ReceiveAll(receiver.get());
  fuzz::Say(there[0], second);
  for (size_t i = 1; i < lanes; ++i) fuzz::Say(there[i], input.Take(share));
  fuzz::ReceiveAll(receiver.get());
  there.clear();
  fuzz::ReceiveAll(receiver.get());
  receiver->SayGoodbye();
  return 0;
}
