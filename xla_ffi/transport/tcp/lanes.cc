#include "xla_ffi/transport/tcp/lanes.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <string>

namespace hetccl::transport::tcp {
namespace {

// Two sockets of 4 MB each moved most on loopback; more buffer falls out of the cache.
constexpr int kLoopbackBuffer = 4 << 20;

enum class Path { kLocalSocket, kLoopback, kNetwork };

Path PathOf(int fd) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return Path::kNetwork;
  if (address.ss_family == AF_UNIX) return Path::kLocalSocket;
  if (address.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address);
    return (ntohl(v4->sin_addr.s_addr) >> 24) == 127 ? Path::kLoopback : Path::kNetwork;
  }
  if (address.ss_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address);
    return IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr) ? Path::kLoopback : Path::kNetwork;
  }
  return Path::kNetwork;
}

long SystemLimit(const char* path) {
  std::ifstream file(path);
  long value = 0;
  file >> value;
  return value;
}

// An explicit size switches the kernel's tuning off, so it is set only where it will be granted.
void SetBuffer(int fd, int forced_option, int option, const char* limit_path) {
  const int size = kLoopbackBuffer;
  if (::setsockopt(fd, SOL_SOCKET, forced_option, &size, sizeof(size)) == 0) return;
  if (SystemLimit(limit_path) >= size) ::setsockopt(fd, SOL_SOCKET, option, &size, sizeof(size));
}

std::string NameOf(const sockaddr_storage& address) {
  char host[INET6_ADDRSTRLEN] = {};
  uint16_t port = 0;
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    ::inet_ntop(AF_INET, &v4.sin_addr, host, sizeof(host));
    port = ntohs(v4.sin_port);
  } else if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    ::inet_ntop(AF_INET6, &v6.sin6_addr, host, sizeof(host));
    port = ntohs(v6.sin6_port);
  }
  return host[0] == 0 ? "" : std::string(host) + ":" + std::to_string(port);
}

}  // namespace

Stripe StripeOf(size_t payload_bytes, size_t lane, size_t lanes) {
  if (payload_bytes <= kStripeAbove) return {0, lane == 0 ? payload_bytes : 0};
  // Whole pages per lane, so that two lanes never write to one cache line.
  const size_t share = (payload_bytes / lanes + 4095) / 4096 * 4096;
  const size_t begin = std::min(payload_bytes, share * lane);
  return {begin, lane + 1 == lanes ? payload_bytes : std::min(payload_bytes, begin + share)};
}

Status PrepareSockets(const std::vector<UniqueFd>& sockets) {
  if (sockets.empty()) return InternalError("a tcp channel needs at least one socket");
  for (const UniqueFd& socket : sockets) {
    const int fd = socket.get();
    if (!SetNonBlocking(fd)) return InternalError(ErrnoMessage("a tcp channel's socket", errno));
    const Path path = PathOf(fd);
    if (path == Path::kLocalSocket) continue;
    const int on = 1;
    if (::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0) {
      return InternalError(ErrnoMessage("TCP_NODELAY on a tcp channel's socket", errno));
    }
    if (path == Path::kLoopback) {
      SetBuffer(fd, SO_SNDBUFFORCE, SO_SNDBUF, "/proc/sys/net/core/wmem_max");
      SetBuffer(fd, SO_RCVBUFFORCE, SO_RCVBUF, "/proc/sys/net/core/rmem_max");
    }
  }
  return Status();
}

std::string PathName(int fd) {
  sockaddr_storage peer = {};
  sockaddr_storage own = {};
  socklen_t size = sizeof(peer);
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) return "";
  size = sizeof(own);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) != 0) return "";
  const std::string from = NameOf(peer);
  return from.empty() ? "" : from + " to " + NameOf(own);
}

Status ChangedOnTheWay(size_t lane, size_t lanes, int fd, const Status& status) {
  std::string link = "stripe " + std::to_string(lane + 1) + " of " + std::to_string(lanes);
  const std::string path = PathName(fd);
  if (!path.empty()) link += ", " + path;
  return Status(status.kind(), "data was changed on the way (" + link + "): " + status.message() +
                                   "; look for a faulty network device, cable or memory between "
                                   "these two hosts");
}

}  // namespace hetccl::transport::tcp
