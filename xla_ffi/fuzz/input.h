// What the targets have in common.
#ifndef XLA_FFI_FUZZ_INPUT_H_
#define XLA_FFI_FUZZ_INPUT_H_

#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "xla_ffi/common/fd.h"
#include "xla_ffi/device/host_space.h"
#include "xla_ffi/transport/transport.h"

namespace hetccl::fuzz {

inline void Require(bool holds) {
  if (!holds) std::abort();
}

// Takes an input apart.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  size_t size() const { return size_; }
  uint8_t Byte() {
    uint8_t value = 0;
    Copy(&value, 1);
    return value;
  }
  uint64_t Number() {
    uint64_t value = 0;
    Copy(&value, sizeof(value));
    return value;
  }
  // Fills `out`, with zeros where the input has ended.
  void Copy(void* out, size_t bytes) {
    std::memset(out, 0, bytes);
    const size_t count = std::min(bytes, size_);
    if (count > 0) std::memcpy(out, data_, count);
    data_ += count;
    size_ -= count;
  }
  std::pair<const uint8_t*, size_t> Take(size_t bytes) {
    const std::pair<const uint8_t*, size_t> part{data_, std::min(bytes, size_)};
    data_ += part.second;
    size_ -= part.second;
    return part;
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

inline device::Space& Host() {
  static auto* space = new device::HostSpace();
  return *space;
}

inline std::pair<UniqueFd, UniqueFd> SocketPair() {
  int fds[2];
  Require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// As much as the socket takes; the rest is lost.
inline void Say(const UniqueFd& socket, std::pair<const uint8_t*, size_t> bytes) {
  (void)!::send(socket.get(), bytes.first, bytes.second, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// Takes messages as an engine does that expects their very sizes, until nothing moves.
inline void ReceiveAll(transport::Receiver* receiver) {
  constexpr uint64_t kMost = 1 << 20;
  while (true) {
    const transport::WireHeader* header = nullptr;
    if (!receiver->Peek(&header).ok() || header == nullptr) return;
    if (header->payload_bytes > kMost) return;  // nobody expects that much here
    const size_t size = header->payload_bytes;
    // Two pieces, each of exactly its size.
    const size_t first = size / 3;
    auto one = std::make_unique<std::byte[]>(first);
    auto two = std::make_unique<std::byte[]>(size - first);
    receiver->Accept({{one.get(), first}, {two.get(), size - first}});
    transport::Progress progress;
    size_t moved = 0;
    do {
      if (!receiver->Step(&progress).ok()) return;
      moved += progress.bytes;
      Require(moved <= size);
    } while (!progress.done && (progress.bytes > 0 || progress.copying));
    if (!progress.done) return;
    Require(moved == size);
  }
}

}  // namespace hetccl::fuzz

#endif  // XLA_FFI_FUZZ_INPUT_H_
