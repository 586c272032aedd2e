// Whether the message at the head of a channel is the one this side waits for.
#ifndef XLA_FFI_EXCHANGE_MATCHING_H_
#define XLA_FFI_EXCHANGE_MATCHING_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/exchange/directory.h"
#include "xla_ffi/transport/message.h"

namespace hetccl {

// What a posted receive expects to arrive.
struct Expected {
  uint64_t epoch;
  uint64_t program;
  uint32_t index;
  uint64_t occurrence;
  uint64_t wire_id;
  uint64_t bytes;
  const std::string* text;  // owned by the receive's plan
};

enum class Verdict {
  kMatch,
  kMismatch,      // the two sides can never agree
  kOtherProgram,  // the peer runs another program, which may yet start here: see IncomingChannel
};

// Compares the head with one receive.
Verdict Judge(const transport::WireHeader& head, const Expected& expected);

// The error text: both sides, and what to do. `waited` is how long the head has waited for its
// program to start here; empty if the two can never agree.
std::string DescribeMismatch(const transport::WireHeader& head, const Expected& expected,
                             const std::string& sender, const std::string& receiver,
                             const Directory& directory,
                             std::optional<Duration> waited = std::nullopt);

}  // namespace hetccl

#endif  // XLA_FFI_EXCHANGE_MATCHING_H_
