#include "xla_ffi/handlers/current_engine.h"
#include "xla_ffi/handlers/frames.h"
#include "xla_ffi/handlers/handlers.h"
#include "xla_ffi/handlers/token.h"

namespace hetccl::handlers {

namespace ffi = xla::ffi;

static ffi::Error ReadStatus(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary) {
  const auto frame = DecodeStatus(args, rets);
  if (frame.has_error()) return frame.error();
  Token chain = Token::Load(frame->from.data);
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr || !engine->failure().ok()) chain.failed = 1;
  chain.Store(frame->to.data);
  return ffi::Error::Success();
}

}  // namespace hetccl::handlers

XLA_FFI_DEFINE_HANDLER_SYMBOL(HetcclStatus, hetccl::handlers::ReadStatus,
                              xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
