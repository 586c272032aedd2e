// From a transport's name and file descriptors to a channel of an engine.
#ifndef XLA_FFI_BINDINGS_TRANSPORTS_H_
#define XLA_FFI_BINDINGS_TRANSPORTS_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "xla_ffi/common/fd.h"
#include "xla_ffi/common/status.h"
#include "xla_ffi/exchange/engine.h"
#include "xla_ffi/transport/rdma/options.h"

namespace hetccl::bindings {

// An unknown transport is an error that lists the known ones. Setting an rdma channel or TLS up
// waits for the peer: release the GIL.
Status AddChannel(Engine& engine, uint32_t local_rank, uint32_t peer_rank, bool outgoing,
                  const std::string& transport, std::vector<UniqueFd> fds,
                  const transport::rdma::Options& rdma, std::vector<std::string> tls_keys);

// The options of an rdma channel from Python's names for them.
transport::rdma::Options RdmaOptions(const std::optional<nanobind::dict>& rdma);

}  // namespace hetccl::bindings

#endif  // XLA_FFI_BINDINGS_TRANSPORTS_H_
