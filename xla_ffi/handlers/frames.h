// What the call frames of the custom calls hold, checked: the same on every platform.
#ifndef XLA_FFI_HANDLERS_FRAMES_H_
#define XLA_FFI_HANDLERS_FRAMES_H_

#include <cstdint>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/exchange/engine.h"
#include "xla_ffi/handlers/buffers.h"

namespace hetccl::handlers {

// Each Decode... returns an error that says what a well-formed call looks like.

struct StartFrame {
  RawBuffer chain_in, chain_out, ticket;
  std::vector<RawBuffer> receives;
  StartRequest request;  // with the sends and receives
};
xla::ffi::ErrorOr<StartFrame> DecodeStart(int32_t device, const xla::ffi::RemainingArgs& args,
                                          const xla::ffi::RemainingRets& rets,
                                          const xla::ffi::Dictionary& attributes);

struct DoneFrame {
  RawBuffer chain_in, chain_out, ticket;
  std::vector<RawBuffer> receives;
  std::vector<const void*> sends;
  bool moved = false;  // a receive buffer is not aliased

  std::vector<const void*> receive_addresses() const;
};
xla::ffi::ErrorOr<DoneFrame> DecodeDone(const xla::ffi::RemainingArgs& args,
                                        const xla::ffi::RemainingRets& rets);

// A value and the result that it is passed on to.
struct Through {
  RawBuffer from, to;
};
// The chain of hetccl_status.
xla::ffi::ErrorOr<Through> DecodeStatus(const xla::ffi::RemainingArgs& args,
                                        const xla::ffi::RemainingRets& rets);

}  // namespace hetccl::handlers

#endif  // XLA_FFI_HANDLERS_FRAMES_H_
