#include "xla_ffi/handlers/current_engine.h"
#include "xla_ffi/handlers/frames.h"
#include "xla_ffi/handlers/handlers.h"
#include "xla_ffi/handlers/token.h"

namespace hetccl::handlers {

namespace ffi = xla::ffi;

static ffi::Error Start(int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        ffi::Dictionary attributes) {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return NoEngine("hetccl_exchange_start");
  const auto frame = DecodeStart(device, args, rets, attributes);
  if (frame.has_error()) return frame.error();

  Token chain = Token::Load(frame->chain_in.data);
  Ticket ticket;
  if (Status status = engine->Start(frame->request, &ticket); !status.ok()) return ToError(status);
  if (ticket.failed) chain.failed = 1;
  chain.Store(frame->chain_out.data);
  Token out;
  out.set_id(ticket.id);
  out.failed = chain.failed;
  out.Store(frame->ticket.data);
  return ffi::Error::Success();
}

}  // namespace hetccl::handlers

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    HetcclExchangeStart, hetccl::handlers::Start,
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs());
