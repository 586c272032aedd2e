// Keeping the copy streams out of the hardware queues of streams that are held.
#include <algorithm>
#include <array>
#include <chrono>
#include <thread>
#include <utility>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/device/stream/stream_space.h"

namespace hetccl::device {
namespace {

// A stream that gets this many marks through while a copy stream gets none is the clock by which
// that one stands: both had nothing else to do, and are served alike. It is the other copy stream,
// or a stream that does nothing else.
constexpr int kRounds = 64;
// Only if no stream gets on there is no clock.
constexpr auto kPatience = std::chrono::milliseconds(500);
constexpr auto kStandstill = std::chrono::seconds(10);  // of a clock that ran
// Drivers deal streams out over 8 to 32 queues.
constexpr int kAttempts = 40;

void Pause() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

}  // namespace

Status StreamSpace::Separate(Stream held) {
  std::lock_guard<std::mutex> lock(separation_mutex_);
  if (separate_.count(held) > 0) return Status();
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    bool separate = false;
    if (Status status = TrySeparate(held, &separate); !status.ok()) return status;
    if (separate) {
      separate_.insert(held);
      return Status();
    }
    separate_.clear();  // the new copy streams may share the queue of another one
  }
  return InternalError("on " + gpu_.name() +
                       " the copy streams of jax_hetccl always share a hardware queue with the "
                       "program's stream; allow more queues (CUDA_DEVICE_MAX_CONNECTIONS=32, "
                       "GPU_MAX_HW_QUEUES=8)");
}

// Holds the stream and looks which copy streams still get on; the others are replaced.
Status StreamSpace::TrySeparate(Stream held, bool* separate) {
  if (Status status = AwaitIdle(held); !status.ok()) return status;
  const std::unique_lock<std::shared_mutex> lock(copy_streams_mutex_);
  Running running;
  // First without the hold: copies that are under way end, unless another held stream is in front.
  if (Status status = SeeRunning(&running); !status.ok()) return status;
  if (running.out && running.in) {
    Flag* flag = nullptr;
    for (int looks = 0; flag == nullptr; ++looks) {
      flag = flags_.Acquire();
      if (flag == nullptr && looks > 100000) return InternalError("no flag comes back");
      if (flag == nullptr) Pause();
    }
    Status status = flags_.Hold(flag, held);
    if (!status.ok()) {
      flags_.Abandon(flag);
      return status;
    }
    status = SeeRunning(&running);
    flags_.Release(flag);  // what was queued meanwhile runs before the next hold
    if (!status.ok()) return status;
  }
  *separate = running.out && running.in;
  for (auto [place, runs] : {std::pair{&out_, running.out}, std::pair{&in_, running.in}}) {
    if (runs) continue;
    Stream next = nullptr;
    Status status = gpu_.StreamCreate(/*high_priority=*/true, &next);
    if (status.ok())
      status = gpu_.StreamDestroy(place->exchange(next));  // what is queued still runs
    if (!status.ok()) return status;
  }
  return Status();
}

Status StreamSpace::AwaitIdle(Stream stream) {
  bool idle = false;
  for (;;) {
    if (Status status = gpu_.StreamQuery(stream, &idle); !status.ok() || idle) return status;
    Pause();
  }
}

Status StreamSpace::SeeRunning(Running* running) {
  struct Probe {
    Stream stream;
    bool* runs;
    Mark* mark = nullptr;
    int rounds = 0;
  };
  bool ticks = false;
  std::array<Probe, 3> probes = {Probe{out_.load(), &running->out}, Probe{in_.load(), &running->in},
                                 Probe{clock_, &ticks}};
  Status status;
  for (Probe& probe : probes) {
    *probe.runs = false;
    if (status.ok()) status = marks_.Acquire(&probe.mark);
    if (status.ok()) status = marks_.Record(probe.mark, probe.stream);
  }
  const TimePoint deadline = Clock::now() + kPatience;
  while (status.ok() && !(running->out && running->in)) {
    int most = 0;
    for (Probe& probe : probes) {
      bool reached = false;
      if (status.ok()) status = marks_.Reached(*probe.mark, &reached);
      if (status.ok() && reached) {
        *probe.runs = true;
        ++probe.rounds;
        status = marks_.Record(probe.mark, probe.stream);
      }
      most = std::max(most, probe.rounds);
    }
    const TimePoint now = Clock::now();
    if (most >= kRounds || now > (most == 0 ? deadline : deadline + kStandstill)) break;
    Pause();
  }
  for (const Probe& probe : probes) {
    if (probe.mark != nullptr) marks_.Release(probe.mark);
  }
  return status;
}

Status StreamSpace::Passes(Stream stream, Duration bound, bool* passes) {
  Mark* mark = nullptr;
  if (Status status = marks_.Acquire(&mark); !status.ok()) return status;
  Status status = marks_.Record(mark, stream);
  const TimePoint deadline = Clock::now() + bound;
  while (status.ok() && !*passes && Clock::now() < deadline) {
    status = marks_.Reached(*mark, passes);
    if (!*passes) Pause();
  }
  // A process that was stopped past the bound has not looked since.
  if (status.ok() && !*passes) status = marks_.Reached(*mark, passes);
  marks_.Release(mark);
  return status;
}

}  // namespace hetccl::device
