// Two ends of a TCP connection over loopback.
#ifndef XLA_FFI_TRANSPORT_TESTING_TCP_PAIR_H_
#define XLA_FFI_TRANSPORT_TESTING_TCP_PAIR_H_

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "xla_ffi/common/fd.h"

namespace hetccl::transport::testing {

// Who connected, and who accepted. Ends the process if a machine has no loopback.
inline std::pair<UniqueFd, UniqueFd> LoopbackTcpPair() {
  const auto require = [](bool ok, const char* what) {
    if (ok) return;
    std::perror(what);
    std::abort();
  };
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* any = reinterpret_cast<sockaddr*>(&address);
  require(::bind(listener.get(), any, size) == 0, "bind");
  require(::listen(listener.get(), 1) == 0, "listen");
  require(::getsockname(listener.get(), any, &size) == 0, "getsockname");
  UniqueFd client(::socket(AF_INET, SOCK_STREAM, 0));
  require(::connect(client.get(), any, size) == 0, "connect");
  UniqueFd server(::accept(listener.get(), nullptr, nullptr));
  require(server.valid(), "accept");
  return {std::move(client), std::move(server)};
}

}  // namespace hetccl::transport::testing

#endif  // XLA_FFI_TRANSPORT_TESTING_TCP_PAIR_H_
