// Shared memory that another process has made and goes on writing to: its layout, the counters of
// both directions, and the headers in its slots.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "xla_ffi/fuzz/input.h"
#include "xla_ffi/transport/shm/factory.h"
#include "xla_ffi/transport/shm/segment.h"

namespace {

using namespace hetccl;

constexpr size_t kControlBytes = 4096;
constexpr uint32_t kSlotBytes = 4096;
constexpr uint32_t kSlots = 3;

std::vector<UniqueFd> Fds(const UniqueFd& memory, UniqueFd socket) {
  std::vector<UniqueFd> fds;
  fds.push_back(std::move(socket));
  fds.emplace_back(::fcntl(memory.get(), F_DUPFD_CLOEXEC, 0));
  return fds;
}

// The input as the whole of a segment.
void Foreign(fuzz::Input input) {
  UniqueFd memory(::memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const size_t size = input.Number() % (kControlBytes + kSlotBytes * kSlots + 1);
  fuzz::Require(::ftruncate(memory.get(), size) == 0);
  const auto [bytes, count] = input.Take(size);
  fuzz::Require(::pwrite(memory.get(), bytes, count, 0) == static_cast<ssize_t>(count));
  ::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  auto [here, there] = fuzz::SocketPair();
  std::unique_ptr<transport::Receiver> receiver;
  if (transport::shm::MakeReceiver(Fds(memory, std::move(here)), fuzz::Host(), &receiver).ok()) {
    fuzz::ReceiveAll(receiver.get());
  }
}

// A segment of the right form, in which the input's bytes turn up.
void Own(fuzz::Input input) {
  UniqueFd memory;
  fuzz::Require(transport::shm::MakeSegment(kSlotBytes, kSlots, &memory).ok());
  transport::shm::Segment theirs;
  fuzz::Require(theirs.Map(memory).ok());
  auto [here, there] = fuzz::SocketPair();
  std::unique_ptr<transport::Receiver> receiver;
  fuzz::Require(
      transport::shm::MakeReceiver(Fds(memory, std::move(here)), fuzz::Host(), &receiver).ok());
  auto [sending, unused] = fuzz::SocketPair();
  std::unique_ptr<transport::Sender> sender;
  fuzz::Require(
      transport::shm::MakeSender(Fds(memory, std::move(sending)), fuzz::Host(), &sender).ok());
  static const auto* payload = new std::vector<std::byte>(kSlotBytes * kSlots * 2);
  transport::WireHeader header = transport::MakeHeader(transport::MessageType::kData);
  header.payload_bytes = payload->size();
  while (input.size() > 0) {
    input.Copy(theirs.slot(input.Byte()), 1 + 4 * input.Byte());
    const uint8_t step = input.Byte();
    theirs.control().published.fetch_add(step < 0xF0 ? step % 4 : input.Number());
    fuzz::Say(there, input.Take(step % 3));
    receiver->OnReady();
    fuzz::ReceiveAll(receiver.get());
    (void)receiver->peer();
    (void)receiver->ArmDoorbell();
  }
  // The same memory as its sender sees it, who must not be led beyond it by any counter.
  theirs.control().freed.store(header.payload_bytes ^ size_t{theirs.control().published.load()});
  sender->Begin(header, {{payload->data(), payload->size()}});
  transport::Progress progress;
  while (sender->Step(&progress).ok() && !progress.done && progress.bytes > 0) {
  }
  (void)sender->peer_has_begun();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  if (input.Byte() % 4 == 0) {
    Foreign(input);
  } else {
    Own(input);
  }
  return 0;
}
