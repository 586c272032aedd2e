#include <utility>

#include "xla_ffi/handlers/buffers.h"
#include "xla_ffi/handlers/current_engine.h"
#include "xla_ffi/handlers/handlers.h"
#include "xla_ffi/handlers/token.h"

namespace hetccl::handlers {

namespace ffi = xla::ffi;

static ffi::Error Start(int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        ffi::Dictionary attributes) {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return NoEngine("hetccl_exchange_start");
  if (args.size() < 1 || rets.size() < 2) {
    return ffi::Error::InvalidArgument(
        "hetccl_exchange_start takes (chain, sends...) and returns (chain, ticket, receives..., "
        "kept...)");
  }
  const RawBuffer chain_in = Argument(args, 0);
  const RawBuffer chain_out = Return(rets, 0);
  const RawBuffer ticket_out = Return(rets, 1);
  for (const RawBuffer& token : {chain_in, chain_out, ticket_out}) {
    if (ffi::Error error = CheckToken(token, "each token of start"); error.failure()) return error;
  }
  auto decoded = DecodeStart(device, attributes);
  if (decoded.has_error()) return decoded.error();
  StartRequest request = std::move(*decoded);
  const auto receives_end = ReceivesEnd(rets.size(), attributes);
  if (receives_end.has_error()) return receives_end.error();
  for (size_t i = 1; i < args.size(); ++i) request.sends.push_back(View(Argument(args, i)));
  for (size_t i = 2; i < *receives_end; ++i) request.receives.push_back(View(Return(rets, i)));

  Token chain = Token::Load(chain_in.data);
  Ticket ticket;
  if (Status status = engine->Start(request, &ticket); !status.ok()) return ToError(status);
  if (ticket.failed) chain.failed = 1;
  chain.Store(chain_out.data);
  Token out;
  out.set_id(ticket.id);
  out.failed = chain.failed;
  out.Store(ticket_out.data);
  return ffi::Error::Success();
}

}  // namespace hetccl::handlers

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    HetcclExchangeStart, hetccl::handlers::Start,
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs());
