#include "xla_ffi/bindings/transports.h"

#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include "xla_ffi/bindings/bindings.h"
#include "xla_ffi/transport/shm/factory.h"
#include "xla_ffi/transport/tcp/factory.h"

namespace hetccl::bindings {

namespace nb = nanobind;

namespace {

// What a transport's factory.h offers.
struct Factory {
  const char* name;
  Status (*make_sender)(std::vector<UniqueFd>, device::Space&, const transport::Staging&,
                        std::unique_ptr<transport::Sender>*);
  Status (*make_receiver)(std::vector<UniqueFd>, device::Space&, const transport::Staging&,
                          std::unique_ptr<transport::Receiver>*);
};

constexpr Factory kFactories[] = {
    {"shm",
     [](std::vector<UniqueFd> fds, device::Space& space, const transport::Staging&,
        std::unique_ptr<transport::Sender>* out) {
       return transport::shm::MakeSender(std::move(fds), space, out);
     },
     [](std::vector<UniqueFd> fds, device::Space& space, const transport::Staging&,
        std::unique_ptr<transport::Receiver>* out) {
       return transport::shm::MakeReceiver(std::move(fds), space, out);
     }},
    {"tcp", transport::tcp::MakeSender, transport::tcp::MakeReceiver},
};

}  // namespace

Status AddChannel(Engine& engine, uint32_t local_rank, uint32_t peer_rank, bool outgoing,
                  const std::string& transport, const std::vector<int>& fds) {
  std::vector<UniqueFd> owned;
  for (int fd : fds) owned.emplace_back(fd);
  device::Space& space = engine.SpaceOf(local_rank);
  const transport::Staging staging{engine.options().staging_slot_bytes,
                                   engine.options().staging_slots};
  std::string known;
  for (const Factory& factory : kFactories) {
    known += known.empty() ? "" : ", ";
    known += factory.name;
    if (transport != factory.name) continue;
    if (outgoing) {
      std::unique_ptr<transport::Sender> sender;
      Status status = factory.make_sender(std::move(owned), space, staging, &sender);
      if (!status.ok()) return status;
      return engine.channels().AddOutgoing(local_rank, peer_rank, std::move(sender));
    }
    std::unique_ptr<transport::Receiver> receiver;
    Status status = factory.make_receiver(std::move(owned), space, staging, &receiver);
    if (!status.ok()) return status;
    return engine.channels().AddIncoming(local_rank, peer_rank, std::move(receiver));
  }
  return InternalError("unknown transport \"" + transport + "\"; known ones: " + known);
}

void DefineTransports(nb::module_& module) {
  module.def(
      "make_shm_segment",
      [](uint32_t slot_bytes, uint32_t slots) {
        UniqueFd memfd;
        Status status = transport::shm::MakeSegment(slot_bytes, slots, &memfd);
        if (!status.ok()) throw std::runtime_error("hetccl: " + status.message());
        return std::vector<int>{memfd.release()};
      },
      nb::arg("slot_bytes") = transport::shm::kDefaultSlotBytes,
      nb::arg("slots") = transport::shm::kDefaultSlots);
  module.attr("GPU_SLOT_BYTES") = transport::shm::kGpuSlotBytes;
  module.attr("GPU_SLOTS") = transport::shm::kGpuSlots;
}

}  // namespace hetccl::bindings
