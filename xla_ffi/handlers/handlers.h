// The XLA custom calls (typed FFI, API version 4), for the CPU platform and for GPUs.
//
// None of them takes a lock for long, or the GIL, and none blocks, but for a GPU's done while a
// section is open (device/stream/exclusion.h). They have state outside of the program, so none is
// compatible with command buffers.
#ifndef XLA_FFI_HANDLERS_HANDLERS_H_
#define XLA_FFI_HANDLERS_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

// hetccl_exchange_start(chain, sends...) -> (chain', ticket, receives..., kept...)
//   Integer attributes: plan (the bits of its u64 id), program, index, kept (how many of the
//   results pass a send through, aliased, for what is computed from it further on; default 0).
//   Begins the exchange that the plan describes for this device. `receives` are written from now
//   on, `sends` are read from now on; both until the matching done has completed.
extern "C" XLA_FFI_Error* HetcclExchangeStart(XLA_FFI_CallFrame* frame);

// hetccl_exchange_done(chain, ticket, receives..., sends...) -> (chain', receives...)
//   `receives` must be aliased to the results. Receives and sends must be where start saw them,
//   which is what keeps XLA from using their memory for something else meanwhile. Completes when
//   the exchange has; never fails for a failed exchange: then the receives are poisoned and
//   chain'[3] is set.
extern "C" XLA_FFI_Error* HetcclExchangeDone(XLA_FFI_CallFrame* frame);

// hetccl_check(flag, values...) -> (values...)
//   `values` should be aliased to the results. Fails with the world's first error if flag's last
//   u32 is not zero: a scalar, a u32[1], or a whole chain token.
extern "C" XLA_FFI_Error* HetcclCheck(XLA_FFI_CallFrame* frame);

// hetccl_status(chain) -> (chain')
//   chain'[3] is set if the world has failed or is gone, otherwise carried over. Lets a program
//   notice a failure that none of its own exchanges has met.
extern "C" XLA_FFI_Error* HetcclStatus(XLA_FFI_CallFrame* frame);

// The same four for CUDA and ROCm: they only queue work on the program's stream (see
// exchange/stream_calls.h). What tokens hold is neither read nor written there: done finds its
// exchange by device, the attribute `plan` and its buffers; check looks at the world instead of the
// flag when it is dispatched, and so does the status, whose chain passes through.
extern "C" XLA_FFI_Error* HetcclGpuExchangeStart(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* HetcclGpuExchangeDone(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* HetcclGpuCheck(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* HetcclGpuStatus(XLA_FFI_CallFrame* frame);

#endif  // XLA_FFI_HANDLERS_HANDLERS_H_
