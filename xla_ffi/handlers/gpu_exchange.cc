// start and done on CUDA and ROCm.
#include <memory>
#include <utility>
#include <vector>

#include "xla_ffi/exchange/stream_calls.h"
#include "xla_ffi/handlers/current_engine.h"
#include "xla_ffi/handlers/frames.h"
#include "xla_ffi/handlers/handlers.h"

namespace hetccl::handlers {

namespace ffi = xla::ffi;

namespace {

device::FillRange ToFill(const RawBuffer& buffer) {
  return {buffer.data, buffer.bytes, PoisonOf(buffer.dtype)};
}

Passed Passes(const RawBuffer& from, const RawBuffer& to) { return {to.data, from.data, to.bytes}; }

ffi::Error ToResult(const Status& status) {
  return status.ok() ? ffi::Error::Success() : ToError(status);
}

}  // namespace

static ffi::Error GpuStart(void* stream, int32_t device, ffi::RemainingArgs args,
                           ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return NoEngine("hetccl_exchange_start");
  auto frame = DecodeStart(device, args, rets, attributes);
  if (frame.has_error()) return frame.error();
  StreamStart start;
  start.request = std::move(frame->request);
  start.request.queue = stream;
  for (const RawBuffer& buffer : frame->receives) start.receives.push_back(ToFill(buffer));
  start.passed = {Passes(frame->chain_in, frame->chain_out)};
  start.defined = {{frame->ticket.data, frame->ticket.bytes, device::Pattern{{}, 0}}};
  return ToResult(StartOnStream(*engine, start));
}

static ffi::Error GpuDone(void* stream, int32_t device, ffi::RemainingArgs args,
                          ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return NoEngine("hetccl_exchange_done");
  auto frame = DecodeDone(args, rets);
  if (frame.has_error()) return frame.error();
  const auto plan = Integer(attributes, "plan");
  if (plan.has_error()) return plan.error();
  StreamDone done;
  done.device_ordinal = device;
  done.plan = static_cast<uint64_t>(*plan);
  done.queue = stream;
  done.moved = frame->moved;
  for (const RawBuffer& buffer : frame->receives) done.receives.push_back(ToFill(buffer));
  done.sends = std::move(frame->sends);
  done.passed = {Passes(frame->chain_in, frame->chain_out)};
  return ToResult(DoneOnStream(*engine, done));
}

static ffi::Error GpuCheck(void* stream, int32_t device, ffi::RemainingArgs args,
                           ffi::RemainingRets rets, ffi::Dictionary) {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return NoEngine("hetccl_check");
  if (args.size() != rets.size() + 1) {
    return ffi::Error::InvalidArgument(
        "hetccl_check takes (flag, values...) and returns (values...)");
  }
  std::vector<Passed> passed;
  for (size_t i = 0; i < rets.size(); ++i) {
    const RawBuffer in = Argument(args, i + 1);
    const RawBuffer out = Return(rets, i);
    if (in.bytes != out.bytes) {
      return ffi::Error::InvalidArgument("hetccl_check: value and result differ in size");
    }
    passed.push_back(Passes(in, out));
  }
  return ToResult(CheckOnStream(*engine, device, stream, passed));
}

// A failure raises in the check at the program's end; a chain in device memory cannot tell it.
static ffi::Error GpuStatus(void* stream, int32_t device, ffi::RemainingArgs args,
                            ffi::RemainingRets rets, ffi::Dictionary) {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return NoEngine("hetccl_status");
  const auto frame = DecodeStatus(args, rets);
  if (frame.has_error()) return frame.error();
  return ToResult(CheckOnStream(*engine, device, stream, {Passes(frame->from, frame->to)}));
}

}  // namespace hetccl::handlers

// Every one of them takes the program's stream and the device before its operands.
#define HETCCL_GPU_HANDLER(symbol, function)                                \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, hetccl::handlers::function,         \
                                xla::ffi::Ffi::Bind()                       \
                                    .Ctx<xla::ffi::PlatformStream<void*>>() \
                                    .Ctx<xla::ffi::DeviceOrdinal>()         \
                                    .RemainingArgs()                        \
                                    .RemainingRets()                        \
                                    .Attrs())

HETCCL_GPU_HANDLER(HetcclGpuExchangeStart, GpuStart);
HETCCL_GPU_HANDLER(HetcclGpuExchangeDone, GpuDone);
HETCCL_GPU_HANDLER(HetcclGpuCheck, GpuCheck);
HETCCL_GPU_HANDLER(HetcclGpuStatus, GpuStatus);
