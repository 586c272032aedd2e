// start and done on CUDA and ROCm.
#include <memory>
#include <utility>

#include "xla_ffi/exchange/stream_calls.h"
#include "xla_ffi/handlers/buffers.h"
#include "xla_ffi/handlers/current_engine.h"
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
  if (args.size() < 1 || rets.size() < 2) {
    return ffi::Error::InvalidArgument(
        "hetccl_exchange_start takes (chain, sends...) and returns (chain, ticket, receives..., "
        "kept...)");
  }
  const RawBuffer chain_in = Argument(args, 0);
  const RawBuffer chain_out = Return(rets, 0);
  const RawBuffer ticket = Return(rets, 1);
  for (const RawBuffer& token : {chain_in, chain_out, ticket}) {
    if (ffi::Error error = CheckToken(token, "each token of start"); error.failure()) return error;
  }
  auto decoded = DecodeStart(device, attributes);
  if (decoded.has_error()) return decoded.error();
  const auto receives_end = ReceivesEnd(rets.size(), attributes);
  if (receives_end.has_error()) return receives_end.error();

  StreamStart start;
  start.request = std::move(*decoded);
  start.request.queue = stream;
  for (size_t i = 1; i < args.size(); ++i) start.request.sends.push_back(View(Argument(args, i)));
  for (size_t i = 2; i < *receives_end; ++i) {
    const RawBuffer buffer = Return(rets, i);
    start.request.receives.push_back(View(buffer));
    start.receives.push_back(ToFill(buffer));
  }
  start.passed = {Passes(chain_in, chain_out)};
  start.defined = {{ticket.data, ticket.bytes, device::Pattern{{}, 0}}};
  return ToResult(StartOnStream(*engine, start));
}

static ffi::Error GpuDone(void* stream, int32_t device, ffi::RemainingArgs args,
                          ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return NoEngine("hetccl_exchange_done");
  if (rets.size() < 1 || args.size() < rets.size() + 1) {
    return ffi::Error::InvalidArgument(
        "hetccl_exchange_done takes (chain, ticket, receives..., sends...) and returns (chain, "
        "receives...)");
  }
  const RawBuffer chain_in = Argument(args, 0);
  const RawBuffer chain_out = Return(rets, 0);
  for (const RawBuffer& token : {chain_in, Argument(args, 1), chain_out}) {
    if (ffi::Error error = CheckToken(token, "each token of done"); error.failure()) return error;
  }
  const auto plan = Integer(attributes, "plan");
  if (plan.has_error()) return plan.error();

  StreamDone done;
  done.device_ordinal = device;
  done.plan = static_cast<uint64_t>(*plan);
  done.queue = stream;
  for (size_t i = 1; i < rets.size(); ++i) {
    const RawBuffer out = Return(rets, i);
    done.moved |= Argument(args, i + 1).data != out.data;
    done.receives.push_back(ToFill(out));
  }
  for (size_t i = rets.size() + 1; i < args.size(); ++i) {
    done.sends.push_back(Argument(args, i).data);
  }
  done.passed = {Passes(chain_in, chain_out)};
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
  if (args.size() != 1 || rets.size() != 1) {
    return ffi::Error::InvalidArgument("hetccl_status takes (chain) and returns (chain)");
  }
  const RawBuffer in = Argument(args, 0);
  const RawBuffer out = Return(rets, 0);
  for (const RawBuffer& token : {in, out}) {
    if (ffi::Error error = CheckToken(token, "each token of status"); error.failure()) return error;
  }
  return ToResult(CheckOnStream(*engine, device, stream, {Passes(in, out)}));
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
