// The bytes of a payload that a socket may send from, or receive into, right now.
#ifndef XLA_FFI_TRANSPORT_WINDOW_H_
#define XLA_FFI_TRANSPORT_WINDOW_H_

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "xla_ffi/device/space.h"
#include "xla_ffi/transport/message.h"
#include "xla_ffi/transport/span_cursor.h"

namespace hetccl::transport {

// Used by one thread at a time.
template <typename SpanType>
class Window {
 public:
  virtual ~Window() = default;
  // Takes on one payload; the one before is finished.
  virtual void Begin(std::vector<SpanType> payload) = 0;
  // Moves what the window's own copies have to do. Does not wait.
  virtual Status Pump() = 0;
  // Describes up to `limit` bytes that the socket may have now, in at most `capacity` entries, and
  // returns how many entries it filled: none if all bytes are with the socket or a copy.
  virtual int Gather(size_t limit, iovec* out, int capacity) const = 0;
  // The socket has sent, or filled, the first `bytes` of these.
  virtual void Advance(size_t bytes) = 0;
  // The payload is where it belongs.
  virtual bool finished() const = 0;
  // A copy is under way: see Progress::copying.
  virtual bool copying() const = 0;
  // See Endpoint::Quiet.
  virtual bool Quiet() = 0;
};

// The payload itself, in host memory.
template <typename SpanType>
class DirectWindow final : public Window<SpanType> {
 public:
  void Begin(std::vector<SpanType> payload) override {
    payload_ = SpanCursor<SpanType>(std::move(payload));
  }
  Status Pump() override { return Status(); }
  int Gather(size_t limit, iovec* out, int capacity) const override {
    return payload_.Gather(limit, out, capacity);
  }
  void Advance(size_t bytes) override { payload_.Advance(bytes); }
  bool finished() const override { return payload_.remaining() == 0; }
  bool copying() const override { return false; }
  bool Quiet() override { return true; }

 private:
  SpanCursor<SpanType> payload_;
};

using SendWindow = Window<ConstSpan>;
using ReceiveWindow = Window<MutableSpan>;

// How much host memory stands between one socket and a device.
struct Staging {
  size_t slot_bytes = 1 << 20;
  size_t slots = 8;
};

// Windows for payloads in this space: direct where host code may touch them, else a ring of slots
// that the space's copiers fill or empty.
Status MakeWindow(device::Space& space, const Staging& staging, std::unique_ptr<SendWindow>* out);
Status MakeWindow(device::Space& space, const Staging& staging,
                  std::unique_ptr<ReceiveWindow>* out);

}  // namespace hetccl::transport

#endif  // XLA_FFI_TRANSPORT_WINDOW_H_
