#include "xla_ffi/exchange/engine.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "xla_ffi/bindings/bindings.h"
#include "xla_ffi/bindings/transports.h"

namespace hetccl::bindings {

namespace nb = nanobind;
using namespace nanobind::literals;

namespace {

using PeerTuple = std::tuple<uint32_t, uint32_t, uint64_t, uint64_t>;
using ZeroTuple = std::tuple<uint32_t, uint64_t, uint64_t>;

struct Failure {
  std::string kind;
  std::string message;
  int lost_rank;
};

void Raise(const Status& status) {
  if (!status.ok()) throw std::runtime_error("hetccl: " + status.message());
}

std::optional<Failure> ToFailure(const Status& status) {
  if (status.ok()) return std::nullopt;
  return Failure{KindName(status.kind()), status.message(), status.lost_rank()};
}

std::vector<PeerRange> Ranges(const std::vector<PeerTuple>& tuples) {
  std::vector<PeerRange> ranges;
  for (const auto& [peer, buffer, offset, bytes] : tuples) {
    ranges.push_back({peer, buffer, offset, bytes});
  }
  return ranges;
}

void AddPlan(EngineObject& self, uint64_t plan_id, std::string text, uint64_t wire_id,
             int device_ordinal, const std::vector<PeerTuple>& sends,
             const std::vector<PeerTuple>& recvs, const std::vector<ZeroTuple>& fills) {
  std::vector<ZeroRange> zeros;
  for (const auto& [buffer, offset, bytes] : fills) zeros.push_back({buffer, offset, bytes});
  Raise(self.engine->AddPlan(plan_id, std::move(text), wire_id, device_ordinal, Ranges(sends),
                             Ranges(recvs), std::move(zeros)));
}

nb::dict Stats(EngineObject& self) {
  const EngineStats stats = self.engine->Stats();
  PeerStats total;
  nb::dict peers;
  const auto entry = [](const PeerStats& peer) {
    nb::dict out;
    out["bytes_sent"] = peer.bytes_sent;
    out["bytes_received"] = peer.bytes_received;
    out["messages_sent"] = peer.messages_sent;
    out["messages_received"] = peer.messages_received;
    return out;
  };
  for (const auto& [rank, peer] : stats.peers) {
    peers[nb::int_(rank)] = entry(peer);
    total.bytes_sent += peer.bytes_sent;
    total.bytes_received += peer.bytes_received;
    total.messages_sent += peer.messages_sent;
    total.messages_received += peer.messages_received;
  }
  nb::dict out = entry(total);
  out["peers"] = peers;
  out["in_flight"] = stats.in_flight;
  out["copies"] = stats.copied;
  nb::dict threads;
  threads["proxy"] = stats.proxy_threads;
  threads["completion"] = stats.completion_threads;
  threads["watchdog"] = 1;
  threads["copy"] = stats.copy_threads;
  out["threads"] = threads;
  nb::dict devices;
  for (const auto& [ordinal, device] : stats.devices) {
    nb::dict entry;
    entry["platform"] = device.platform;
    entry["name"] = device.name;
    for (const auto& [key, value] : device.space) {
      if (key != "memops") entry[key.c_str()] = value;
    }
    entry["stream_sync"] = device.space.at("memops") != 0 ? "memops" : "hostfunc";
    devices[nb::int_(ordinal)] = entry;
  }
  out["devices"] = devices;
  nb::list routed;
  for (const EngineStats::Routed& channel : stats.routed) {
    nb::dict entry;
    entry["local_rank"] = channel.local_rank;
    entry["peer_rank"] = channel.peer_rank;
    entry["outgoing"] = channel.outgoing;
    entry["device"] = channel.route.device;
    entry["port"] = channel.route.port;
    entry["slots"] = channel.route.slots;
    entry["bytes_copied"] = channel.route.copied;
    entry["registrations"] = channel.route.registrations;
    routed.append(entry);
  }
  out["routed"] = routed;
  return out;
}

// A device of the engine together with what it was opened with.
void SetLocalDevice(EngineObject& self, int ordinal, uint32_t rank, const std::string& platform) {
  if (platform == "cpu") return Raise(self.engine->SetLocalDevice(ordinal, rank));
  device::StreamSpaceOptions options;
  options.ordinal = ordinal;
  options.sync = self.stream_sync;
  if (platform == "CUDA") {
    options.vendor = device::Vendor::kCuda;
  } else if (platform == "ROCM") {
    options.vendor = device::Vendor::kHip;
  } else {
    throw std::runtime_error("hetccl: unknown platform \"" + platform +
                             "\"; known ones: cpu, CUDA, ROCM");
  }
  std::shared_ptr<device::StreamSpace> gpu;
  Raise(device::StreamSpace::Open(options, &gpu));
  Raise(self.engine->SetLocalDevice(ordinal, rank, std::move(gpu)));
}

bool ExitsOnIntegerFailure(const std::string& word) {
  if (word != "exit" && word != "raise") {
    throw std::runtime_error("hetccl: on_integer_failure is \"" + word +
                             "\"; it must be exit or raise");
  }
  return word == "exit";
}

// A ring of less than two slots would not overlap anything, and of none, hang.
void CheckStaging(uint64_t slot_bytes, uint64_t slots) {
  if (slot_bytes >= 4096 && slot_bytes <= (64 << 20) && slots >= 2 && slots <= 1024) return;
  throw std::runtime_error(
      "hetccl: staging_slot_bytes must be 4 KB to 64 MB, and staging_slots 2 to 1024");
}

void Construct(EngineObject* self, uint64_t epoch, double timeout_s, double arrival_timeout_s,
               double mismatch_grace_s, double abort_grace_s, int proxy_threads, double spin_us,
               const std::string& stream_sync, const std::string& on_integer_failure,
               uint64_t staging_slot_bytes, uint64_t staging_slots, int copy_threads,
               bool checksum) {
  CheckStaging(staging_slot_bytes, staging_slots);
  EngineOptions options;
  options.epoch = epoch;
  options.timeout_s = timeout_s;
  options.arrival_timeout_s = arrival_timeout_s;
  options.mismatch_grace_s = mismatch_grace_s;
  options.abort_grace_s = abort_grace_s;
  options.proxy_threads = proxy_threads;
  options.spin_us = spin_us;
  options.exit_on_integer_failure = ExitsOnIntegerFailure(on_integer_failure);
  options.staging_slot_bytes = staging_slot_bytes;
  options.staging_slots = staging_slots;
  options.copy_threads = copy_threads;
  options.checksum = checksum;
  new (self) EngineObject(std::make_shared<Engine>(options), stream_sync);
}

}  // namespace

SectionObject::SectionObject(Engine& engine, const std::vector<int>& ordinals) {
  for (int ordinal : ordinals) {
    if (auto gpu = engine.Gpu(ordinal)) gpus_.push_back(std::move(gpu));
  }
}

bool SectionObject::Enter(double timeout_s) {
  const TimePoint deadline = Clock::now() + Seconds(timeout_s);
  for (const auto& gpu : gpus_) open_.emplace_back(&gpu->exclusion());
  for (const auto& gpu : gpus_) {
    if (!gpu->exclusion().AwaitNoHold(std::max(deadline - Clock::now(), Duration(0)))) return false;
  }
  return true;
}

EngineObject::~EngineObject() {
  // Joining threads that run XLA programs with Python callbacks needs the GIL released.
  if (engine.use_count() != 1) return;
  nb::gil_scoped_release release;
  engine.reset();
}

void DefineEngine(nb::module_& module) {
  nb::class_<Failure>(module, "Failure")
      .def(nb::init<std::string, std::string, int>(), "kind"_a, "message"_a, "lost_rank"_a = -1)
      .def_ro("kind", &Failure::kind)
      .def_ro("message", &Failure::message)
      .def_ro("lost_rank", &Failure::lost_rank)
      .def("__repr__", [](const Failure& failure) {
        return "Failure(" + failure.kind + ": " + failure.message + ")";
      });
  nb::class_<SectionObject>(module, "Section")
      .def("enter", &SectionObject::Enter, "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("leave", &SectionObject::Leave);
  nb::class_<EngineObject>(module, "Engine")
      .def("__init__", &Construct, nb::kw_only(), "epoch"_a, "timeout_s"_a = 60.0,
           "arrival_timeout_s"_a = 600.0, "mismatch_grace_s"_a = 2.0, "abort_grace_s"_a = 2.0,
           "proxy_threads"_a = 0, "spin_us"_a = 50.0, "stream_sync"_a = "auto",
           "on_integer_failure"_a = "exit", "staging_slot_bytes"_a = uint64_t{1} << 20,
           "staging_slots"_a = uint64_t{8}, "copy_threads"_a = 0, "checksum"_a = false)
      .def("set_local_device", &SetLocalDevice, "device_ordinal"_a, "rank"_a, "platform"_a = "cpu")
      .def(
          "set_rank_name",
          [](EngineObject& self, uint32_t rank, std::string name) {
            self.engine->directory().SetRank(rank, std::move(name));
          },
          "rank"_a, "name"_a)
      .def(
          "set_program",
          [](EngineObject& self, uint64_t program, std::string text) {
            self.engine->directory().SetProgram(program, std::move(text));
          },
          "program_id"_a, "text"_a)
      .def(
          "add_channel",
          [](EngineObject& self, uint32_t local_rank, uint32_t peer_rank, bool outgoing,
             const std::string& transport, const std::vector<int>& fds,
             const std::optional<nb::dict>& rdma, const std::vector<nb::bytes>& tls_keys) {
            std::vector<UniqueFd> owned;
            for (int fd : fds) owned.emplace_back(fd);
            std::vector<std::string> keys;
            for (const nb::bytes& key : tls_keys) keys.emplace_back(key.c_str(), key.size());
            const transport::rdma::Options options = RdmaOptions(rdma);
            Status status;
            {
              // A GPU's slots wait until nothing is held, a queue pair and TLS for the peer.
              nb::gil_scoped_release release;
              status = AddChannel(*self.engine, local_rank, peer_rank, outgoing, transport,
                                  std::move(owned), options, std::move(keys));
            }
            Raise(status);
          },
          nb::kw_only(), "local_rank"_a, "peer_rank"_a, "outgoing"_a, "transport"_a, "fds"_a,
          "rdma"_a = nb::none(), "tls_keys"_a = std::vector<nb::bytes>())
      .def("add_plan", &AddPlan, "plan_id"_a, "text"_a, "wire_id"_a, "device_ordinal"_a, "sends"_a,
           "recvs"_a, "fills"_a = std::vector<ZeroTuple>())
      .def(
          "wait_failure",
          [](EngineObject& self, double timeout_s) -> std::optional<Failure> {
            nb::gil_scoped_release release;
            const auto candidate = self.engine->WaitFailure(Seconds(timeout_s));
            return candidate ? ToFailure(*candidate) : std::nullopt;
          },
          "timeout_s"_a)
      .def(
          "abort",
          [](EngineObject& self, const std::string& kind, std::string message) {
            nb::gil_scoped_release release;
            self.engine->Abort(Status(KindFromName(kind), std::move(message)));
          },
          "kind"_a, "message"_a)
      .def("failure", [](EngineObject& self) { return ToFailure(self.engine->failure()); })
      .def(
          "section",
          [](EngineObject& self, const std::vector<int>& device_ordinals) {
            return new SectionObject(*self.engine, device_ordinals);
          },
          "device_ordinals"_a)
      .def("stats", &Stats)
      .def("pending",
           [](EngineObject& self) {
             std::vector<std::string> lines;
             for (PendingPart& part : self.engine->Pending()) lines.push_back(std::move(part.text));
             return lines;
           })
      .def("waits",
           [](EngineObject& self) {
             std::vector<std::tuple<uint32_t, uint64_t, std::string>> waits;
             for (PendingPart& part : self.engine->Pending()) {
               waits.emplace_back(part.peer_rank, part.program, std::move(part.text));
             }
             return waits;
           })
      .def(
          "close",
          [](EngineObject& self, double timeout_s) {
            Status status;
            {
              nb::gil_scoped_release release;
              status = self.engine->Close(Seconds(timeout_s));
            }
            Raise(status);
          },
          "timeout_s"_a = 5.0);
}

}  // namespace hetccl::bindings
