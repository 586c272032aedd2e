// What an exchange's custom calls do on a GPU, without XLA's call frames.
//
// They only queue work and return, but that `done` waits on the host while a section is open
// (device/stream/exclusion.h) and while a peer that its exchange receives from has not connected.
// Ordering is the stream's: `start` leaves a mark in the stream of
// the program, behind which the proxy threads may touch the buffers; `done` leaves a hold there,
// which the thread that ends the exchange's last part releases.
//
// Failure: the receive buffers are poisoned before the hold is released, by the completion pool,
// which may wait for the device's copy streams; those never wait for a peer. If that does not end
// within EngineOptions::give_back_s, the process ends.
//
// After an error of a call nothing touches the buffers of its exchange any more.
#ifndef XLA_FFI_EXCHANGE_STREAM_CALLS_H_
#define XLA_FFI_EXCHANGE_STREAM_CALLS_H_

#include <cstdint>
#include <vector>

#include "xla_ffi/common/status.h"
#include "xla_ffi/device/stream/stream_space.h"
#include "xla_ffi/exchange/engine.h"

namespace hetccl {

// A value that passes through a call: copied on the device unless both are one buffer.
struct Passed {
  std::byte* to;
  const std::byte* from;
  uint64_t bytes;
};

struct StreamStart {
  StartRequest request;  // with the program's stream as queue
  // The receive buffers again, with what poisons them.
  std::vector<device::FillRange> receives;
  std::vector<Passed> passed;              // the chain
  std::vector<device::FillRange> defined;  // outputs without meaning on a GPU: the ticket
};

struct StreamDone {
  int device_ordinal = 0;
  uint64_t plan = 0;
  device::Queue queue = nullptr;
  std::vector<device::FillRange> receives;
  std::vector<const void*> sends;
  std::vector<Passed> passed;
  bool moved = false;  // a receive buffer is not aliased
};

// After a failure nothing begins and the receives are poisoned in the stream's order; the check at
// the program's end raises. An error at once: see Engine::Start, and for receives that cannot be
// poisoned, the failure itself.
Status StartOnStream(Engine& engine, const StreamStart& start);

// An error for buffers that are not where start saw them; the stream is held nevertheless, so that
// their memory is not used for something else while bytes still land there.
Status DoneOnStream(Engine& engine, const StreamDone& done);

// The world's failure if there is one by now; otherwise only passes values on.
Status CheckOnStream(Engine& engine, int device_ordinal, device::Queue queue,
                     const std::vector<Passed>& passed);

}  // namespace hetccl

#endif  // XLA_FFI_EXCHANGE_STREAM_CALLS_H_
