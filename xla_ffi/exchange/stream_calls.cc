#include "xla_ffi/exchange/stream_calls.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>

namespace hetccl {
namespace {

using device::FillRange;
using device::Hold;
using device::StreamSpace;

bool CanBePoisoned(const std::vector<FillRange>& receives) {
  return std::all_of(receives.begin(), receives.end(), [](const FillRange& range) {
    return range.bytes == 0 || range.pattern.size > 0;
  });
}

Status GpuOf(Engine& engine, int ordinal, std::shared_ptr<StreamSpace>* gpu) {
  *gpu = engine.Gpu(ordinal);
  if (*gpu != nullptr) return Status();
  return InternalError("GPU " + std::to_string(ordinal) +
                       " is not a device of this world; the program was compiled for another world "
                       "or process: clear JAX's caches (jax.clear_caches()) and trace it again");
}

Status Pass(StreamSpace& gpu, const std::vector<Passed>& values, device::Queue queue) {
  for (const Passed& value : values) {
    Status status = gpu.Copy(value.to, value.from, value.bytes, queue);
    if (!status.ok()) return status;
  }
  return Status();
}

// Ends the process: the program would go on with integers that nobody sent.
void ExitWith(const Status& failure) {
  std::fprintf(
      stderr,
      "hetccl %s: %s\nhetccl: the exchange receives integers, which cannot be poisoned, so "
      "this process ends; HETCCL_ON_INTEGER_FAILURE=raise delivers zeros and raises at the "
      "next check instead\n",
      KindName(failure.kind()), failure.message().c_str());
  std::fflush(stderr);
  ::_exit(1);
}

// A failed exchange whose stream is held, or has come past done. On a thread that may wait.
struct Failed {
  std::shared_ptr<Exchange> exchange;
  std::shared_ptr<StreamSpace> gpu;
  std::shared_ptr<const ChannelContext> context;
  std::vector<FillRange> receives;
  bool exit_on_integers;

  // True if delivering zeros is not what was asked for. A world that ends on purpose is no failure.
  bool MustExit() const {
    return exit_on_integers && !context->closing.load() && !CanBePoisoned(receives);
  }
  void PoisonAndRelease(Hold* hold) const {
    if (MustExit()) ExitWith(context->failure.adopted());
    // The buffers are not ours before the program has come to its start.
    bool started = false;
    while (exchange->PollStarted(&started).ok() && !started) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    // If the device is lost, so is the program. If a held queue holds the fill up, the program goes
    // on with what the buffers hold: the error is told, and a stream held for good would help
    // nobody.
    if (started) (void)gpu->FillNow(receives).ok();
    hold->Release();
  }
};

Status Moved() {
  return InternalError(
      "hetccl_exchange_done: XLA moved a buffer between start and done, so that what was sent or "
      "received may be lost; an exchange must not be carried through a loop, done must alias its "
      "receives, and its sends must be those of start");
}

// Holds the stream until the exchange is complete.
Status HoldUntilComplete(Failed failed, device::Queue queue) {
  bool has_failed = false;
  if (failed.exchange->Complete(&has_failed)) {
    if (!has_failed) return Status();
    if (failed.MustExit()) ExitWith(failed.context->failure.adopted());
    return failed.gpu->Fill(failed.receives, queue);
  }
  std::shared_ptr<Hold> hold;
  if (Status status = failed.gpu->HoldQueue(queue, &hold); !status.ok()) return status;
  const std::shared_ptr<Exchange> exchange = failed.exchange;
  auto waiter = [failed = std::move(failed), hold](bool exchange_failed) {
    if (!exchange_failed) return hold->Release();
    failed.exchange->pool().Post([failed, hold] { failed.PoisonAndRelease(hold.get()); });
  };
  if (exchange->Await(waiter, &has_failed, Exchange::Runs::kAtOnce)) waiter(has_failed);
  return Status();
}

}  // namespace

Status StartOnStream(Engine& engine, const StreamStart& start) {
  const StartRequest& request = start.request;
  std::shared_ptr<StreamSpace> gpu;
  Status status = GpuOf(engine, request.device_ordinal, &gpu);
  if (!status.ok()) return status;
  Ticket ticket;
  if (status = engine.Start(request, &ticket); !status.ok()) return status;
  if (ticket.failed) {
    if (engine.options().exit_on_integer_failure && !CanBePoisoned(start.receives)) {
      return engine.failure();
    }
    if (status = gpu->Fill(start.receives, request.queue); !status.ok()) return status;
  }
  if (status = gpu->Fill(start.defined, request.queue); !status.ok()) return status;
  return Pass(*gpu, start.passed, request.queue);
}

Status DoneOnStream(Engine& engine, const StreamDone& done) {
  std::shared_ptr<StreamSpace> gpu;
  Status status = GpuOf(engine, done.device_ordinal, &gpu);
  if (!status.ok()) return status;
  std::vector<const void*> receives;
  for (const FillRange& range : done.receives) receives.push_back(range.data);
  const std::shared_ptr<Exchange> exchange =
      engine.TakeFromStream(done.device_ordinal, done.plan, receives, done.sends);
  if (exchange == nullptr) {
    // A start after the failure begins nothing and has poisoned the receives.
    if (!engine.failure().ok()) return Pass(*gpu, done.passed, done.queue);
    return InternalError("hetccl_exchange_done: no exchange of plan " + std::to_string(done.plan) +
                         " was started on GPU " + std::to_string(done.device_ordinal) +
                         "; done was called twice, or the world that started it was shut down");
  }
  const bool moved = done.moved || exchange->receive_addresses != receives ||
                     exchange->send_addresses != done.sends;
  if (moved) engine.CountCopied();
  if (status = Pass(*gpu, done.passed, done.queue); !status.ok()) return status;
  Failed failed{exchange, gpu, engine.context(), done.receives,
                engine.options().exit_on_integer_failure};
  if (moved) failed.receives.clear();  // start's may be gone, done's are not the exchange's
  if (status = HoldUntilComplete(std::move(failed), done.queue); !status.ok()) return status;
  return moved ? Moved() : Status();
}

Status CheckOnStream(Engine& engine, int device_ordinal, device::Queue queue,
                     const std::vector<Passed>& passed) {
  if (Status status = engine.failure(); !status.ok()) return status;
  std::shared_ptr<StreamSpace> gpu;
  if (Status status = GpuOf(engine, device_ordinal, &gpu); !status.ok()) return status;
  return Pass(*gpu, passed, queue);
}

}  // namespace hetccl
