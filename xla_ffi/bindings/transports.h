// From a transport's name and file descriptors to a channel of an engine.
#ifndef XLA_FFI_BINDINGS_TRANSPORTS_H_
#define XLA_FFI_BINDINGS_TRANSPORTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "xla_ffi/common/status.h"
#include "xla_ffi/exchange/engine.h"

namespace hetccl::bindings {

// Takes ownership of the descriptors, also when it fails. An unknown transport is an error that
// lists the known ones.
Status AddChannel(Engine& engine, uint32_t local_rank, uint32_t peer_rank, bool outgoing,
                  const std::string& transport, const std::vector<int>& fds);

}  // namespace hetccl::bindings

#endif  // XLA_FFI_BINDINGS_TRANSPORTS_H_
