// A transport inside one process, well-behaved or faulty on purpose. For tests only.
#ifndef XLA_FFI_TRANSPORT_TESTING_LOOPBACK_H_
#define XLA_FFI_TRANSPORT_TESTING_LOOPBACK_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/transport/transport.h"

namespace hetccl::transport::testing {

// What goes wrong, all at the same time if so asked.
struct Faults {
  // No step moves more than this (short writes and reads).
  size_t max_step_bytes = std::numeric_limits<size_t>::max();
  // At least this long between two steps that move something.
  Duration delay{};
  // The connection breaks once this many bytes, headers included, were sent.
  uint64_t reset_after = std::numeric_limits<uint64_t>::max();
  // This message's header (counting from 0) arrives with a wrong magic number.
  uint64_t corrupt_header_of = std::numeric_limits<uint64_t>::max();
  // Nothing is sent after this many bytes, and nothing says so.
  uint64_t stall_after = std::numeric_limits<uint64_t>::max();
};

// Two connected halves with `capacity` bytes between them. Each half is used by one thread at a
// time, the two by different threads if so wished.
struct Pair {
  std::unique_ptr<Sender> sender;
  std::unique_ptr<Receiver> receiver;
};
Pair MakeLoopback(size_t capacity = 64 * 1024);
Pair MakeFaulty(const Faults& faults, size_t capacity = 64 * 1024);

}  // namespace hetccl::transport::testing

#endif  // XLA_FFI_TRANSPORT_TESTING_LOOPBACK_H_
