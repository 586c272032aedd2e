// Keeping the copy streams out of the hardware queues of streams that are held.
#include <chrono>
#include <thread>
#include <utility>

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
  *separate = true;
  for (std::atomic<Stream>* place : {&out_, &in_}) {
    if (!status.ok()) break;
    Mark* mark = nullptr;
    if (status = marks_.Acquire(&mark); !status.ok()) break;
    status = marks_.Record(mark, place->load());
    const TimePoint deadline = Clock::now() + kPatience;
    done = false;
    while (status.ok() && !done && Clock::now() < deadline) {
      status = marks_.Reached(*mark, &done);
      if (!done) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    marks_.Release(mark);
    if (!status.ok() || done) continue;
    *separate = false;
    Stream next = nullptr;
    status = gpu_.StreamCreate(/*high_priority=*/true, &next);
    // What is queued in the old stream still runs, once the hold is released.
    if (status.ok()) status = gpu_.StreamDestroy(place->exchange(next));
  }
  if (hold != nullptr) hold->Release();
  return status;
}

}  // namespace hetccl::device
