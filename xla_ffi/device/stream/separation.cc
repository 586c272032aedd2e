// Keeping the copy streams out of the hardware queues of streams that are held.
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/device/stream/stream_space.h"

namespace hetccl::device {
namespace {

// Copies of other channels may be under way: the ring of one takes a millisecond.
constexpr auto kPatience = std::chrono::milliseconds(20);
// Drivers deal streams out over 8 to 32 queues.
constexpr int kAttempts = 40;

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
  Mark* reached = nullptr;
  if (Status status = marks_.Acquire(&reached); !status.ok()) return status;
  std::shared_ptr<Hold> hold;
  Status status = marks_.Record(reached, held);
  if (status.ok()) status = HoldStream(held, &hold);
  bool done = false;
  // The hold is next. A device that is lost reaches no mark, but a query tells.
  for (int looks = 1; status.ok() && !done; ++looks) {
    status = marks_.Reached(*reached, &done);
    bool idle = false;
    if (status.ok() && looks % 1000 == 0) status = gpu_.StreamQuery(held, &idle);
    if (!done) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  marks_.Release(reached);
  std::vector<std::atomic<Stream>*> blocked;
  for (std::atomic<Stream>* place : {&out_, &in_}) {
    bool runs = false;
    if (status.ok()) status = Passes(place->load(), kPatience, &runs);
    if (!runs) blocked.push_back(place);
  }
  if (hold != nullptr) hold->Release();  // what was queued meanwhile runs before the next hold
  *separate = blocked.empty();
  for (std::atomic<Stream>* place : blocked) {
    if (!status.ok()) break;
    Stream next = nullptr;
    if (status = gpu_.StreamCreate(/*high_priority=*/true, &next); !status.ok()) break;
    const std::unique_lock<std::shared_mutex> lock(copy_streams_mutex_);
    status = gpu_.StreamDestroy(place->exchange(next));  // what is queued still runs
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
    if (!*passes) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  marks_.Release(mark);
  return status;
}

}  // namespace hetccl::device
