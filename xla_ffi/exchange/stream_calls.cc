#include "xla_ffi/exchange/stream_calls.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "xla_ffi/common/thread.h"
#include "xla_ffi/exchange/end_process.h"

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
[[noreturn]] void EndForIntegers(const Status& failure) {
  EndProcess(failure,
             "the exchange receives integers, which cannot be poisoned, so this process ends; "
             "HETCCL_ON_INTEGER_FAILURE=raise delivers zeros and raises at the next check instead");
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
  void PoisonAndRelease(Hold* hold) const;
  // Without the hold: Ok once the receives are poisoned, or the device is lost and so its program.
  Status Poison(std::atomic<int64_t>* last_step) const;
};

Status Failed::Poison(std::atomic<int64_t>* last_step) const {
  // The buffers are not ours before the program has come to its start.
  bool started = false;
  while (!started) {
    if (!exchange->PollStarted(&started).ok()) return Status();
    last_step->store(Clock::now().time_since_epoch().count());
    if (!started) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  const Status status = gpu->FillNow(receives, context->bounds.give_back);
  return status.ok() || gpu->Lost() ? Status() : status;
}

// A fill that comes behind the release would hit memory that is in use for something else, and
// without one the program would compute with half of what it was sent. So the fill ends in time, or
// the process does. It runs on a thread of its own, as the driver may keep it for good.
void Failed::PoisonAndRelease(Hold* hold) const {
  if (MustExit()) EndForIntegers(context->failure.adopted());
  const auto last_step =
      std::make_shared<std::atomic<int64_t>>(Clock::now().time_since_epoch().count());
  auto promise = std::make_shared<std::promise<Status>>();
  std::future<Status> poisoned = promise->get_future();
  const auto poison = [self = *this, last_step, promise] {
    promise->set_value(self.Poison(last_step.get()));
  };
  Thread thread;
  try {
    thread = Thread("hetccl-poison", poison);
  } catch (const std::system_error&) {  // the system gives no more threads
    poison();
  }
  // Some more than the fill itself waits.
  const Duration bound = context->bounds.give_back + std::chrono::milliseconds(500);
  // Several looks, half a second: a process that was stopped meanwhile gets time to go on.
  constexpr int kLooks = 25;
  int late_looks = 0;
  int64_t seen = last_step->load();
  while (poisoned.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready) {
    const int64_t step = last_step->load();
    const bool late = step == seen && Clock::now() - TimePoint(Duration(step)) >= bound;
    seen = step;
    late_looks = late ? late_looks + 1 : 0;
    if (late_looks < kLooks) continue;
    EndProcess(context->failure.adopted(),
               "the driver of " + gpu->name() +
                   " does not return from a call that poisons what failed: something else waits "
                   "in the driver for the whole device (the load of a program or kernel, an "
                   "allocation; docs/gpu.md), so this process ends");
  }
  const Status status = poisoned.get();
  if (thread.joinable()) thread.Join();
  if (!status.ok()) {
    EndProcess(context->failure.adopted(),
               "what failed cannot be poisoned: " + status.message() + "; so this process ends");
  }
  hold->Release();
}

Status Moved() {
  return InternalError(
      "hetccl_exchange_done: XLA moved a buffer between start and done, so that what was sent or "
      "received may be lost; an exchange must not be carried through a loop, done must alias its "
      "receives, and its sends must be those of start");
}

// Waits on the host for the exchange's end; true if it failed. Bounded as the exchange is. For
// XLA's thread this is what the held stream would be for its device: nothing that it would launch
// next could run before.
bool AwaitOnHost(Exchange& exchange) {
  auto end = std::make_shared<std::promise<bool>>();
  std::future<bool> failed = end->get_future();
  bool has_failed = false;
  const auto tell = [end](bool exchange_failed) { end->set_value(exchange_failed); };
  return exchange.Await(tell, &has_failed, Exchange::Runs::kAtOnce) ? has_failed : failed.get();
}

// What a program does behind an exchange that has ended.
Status GoOn(const Failed& failed, bool has_failed, device::Queue queue) {
  if (!has_failed) return Status();
  if (failed.MustExit()) EndForIntegers(failed.context->failure.adopted());
  return failed.gpu->Fill(failed.receives, queue);
}

// Holds the stream until the exchange is complete.
Status HoldUntilComplete(Engine& engine, Failed failed, device::Queue queue) {
  bool has_failed = false;
  if (failed.exchange->Complete(&has_failed)) return GoOn(failed, has_failed, queue);
  std::shared_ptr<Hold> hold;
  // The slots of a channel that is still to come wait until no stream is held: a hold of the
  // exchange that needs the channel would keep them away for good.
  if (engine.PeersConnected(failed.exchange->plan())) {
    if (Status status = failed.gpu->HoldQueue(queue, &hold); !status.ok()) return status;
  }
  if (hold == nullptr) return GoOn(failed, AwaitOnHost(*failed.exchange), queue);
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
  // First what may fail: behind an error XLA frees the buffers.
  if (status = gpu->Fill(start.defined, request.queue); !status.ok()) return status;
  if (status = Pass(*gpu, start.passed, request.queue); !status.ok()) return status;
  Ticket ticket;
  status = engine.Start(request, &ticket);
  if (!status.ok() || !ticket.failed) return status;
  if (engine.options().exit_on_integer_failure && !CanBePoisoned(start.receives)) {
    return engine.failure();
  }
  return gpu->Fill(start.receives, request.queue);
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
  Failed failed{exchange, gpu, engine.context(), done.receives,
                engine.options().exit_on_integer_failure};
  if (moved) failed.receives.clear();  // start's may be gone, done's are not the exchange's
  status = Pass(*gpu, done.passed, done.queue);
  if (status.ok()) status = HoldUntilComplete(engine, std::move(failed), done.queue);
  if (status.ok()) return moved ? Moved() : status;
  // Behind an error XLA frees the buffers, so nothing may touch them any more.
  engine.Fail(status);
  (void)AwaitOnHost(*exchange);
  return status;
}

Status CheckOnStream(Engine& engine, int device_ordinal, device::Queue queue,
                     const std::vector<Passed>& passed) {
  if (Status status = engine.failure(); !status.ok()) return status;
  std::shared_ptr<StreamSpace> gpu;
  if (Status status = GpuOf(engine, device_ordinal, &gpu); !status.ok()) return status;
  return Pass(*gpu, passed, queue);
}

}  // namespace hetccl
