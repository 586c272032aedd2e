#include <cstring>

#include "xla_ffi/handlers/buffers.h"
#include "xla_ffi/handlers/current_engine.h"
#include "xla_ffi/handlers/handlers.h"

namespace hetccl::handlers {

namespace ffi = xla::ffi;

static ffi::Error Check(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary) {
  if (args.size() != rets.size() + 1) {
    return ffi::Error::InvalidArgument(
        "hetccl_check takes (flag, values...) and returns (values...)");
  }
  const RawBuffer flag = Argument(args, 0);
  if (flag.dtype != ffi::DataType::U32 || flag.bytes < sizeof(uint32_t)) {
    return ffi::Error::InvalidArgument("hetccl_check: the flag must be a u32");
  }
  uint32_t failed = 0;
  std::memcpy(&failed, flag.data + flag.bytes - sizeof(failed), sizeof(failed));
  if (failed != 0) {
    const std::shared_ptr<Engine> engine = CurrentEngine();
    const Status status = engine ? engine->failure() : Status();
    return ToError(!status.ok() ? status
                                : Status(ErrorKind::kAborted,
                                         "an exchange of this program failed and its world was "
                                         "shut down meanwhile"));
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    const RawBuffer in = Argument(args, i + 1);
    const RawBuffer out = Return(rets, i);
    if (in.bytes != out.bytes) {
      return ffi::Error::InvalidArgument("hetccl_check: value and result differ in size");
    }
    if (in.data != out.data && in.bytes > 0) std::memcpy(out.data, in.data, in.bytes);
  }
  return ffi::Error::Success();
}

}  // namespace hetccl::handlers

XLA_FFI_DEFINE_HANDLER_SYMBOL(HetcclCheck, hetccl::handlers::Check,
                              xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
