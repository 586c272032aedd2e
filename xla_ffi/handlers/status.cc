#include "xla_ffi/handlers/buffers.h"
#include "xla_ffi/handlers/current_engine.h"
#include "xla_ffi/handlers/handlers.h"
#include "xla_ffi/handlers/token.h"

namespace hetccl::handlers {

namespace ffi = xla::ffi;

static ffi::Error ReadStatus(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary) {
  if (args.size() != 1 || rets.size() != 1) {
    return ffi::Error::InvalidArgument("hetccl_status takes (chain) and returns (chain)");
  }
  const RawBuffer in = Argument(args, 0);
  const RawBuffer out = Return(rets, 0);
  for (const RawBuffer& token : {in, out}) {
    if (ffi::Error error = CheckToken(token, "each token of status"); error.failure()) return error;
  }
  Token chain = Token::Load(in.data);
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr || !engine->failure().ok()) chain.failed = 1;
  chain.Store(out.data);
  return ffi::Error::Success();
}

}  // namespace hetccl::handlers

XLA_FFI_DEFINE_HANDLER_SYMBOL(HetcclStatus, hetccl::handlers::ReadStatus,
                              xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
