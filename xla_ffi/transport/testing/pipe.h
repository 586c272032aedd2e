// The bytes between the two halves of a loopback channel.
#ifndef XLA_FFI_TRANSPORT_TESTING_PIPE_H_
#define XLA_FFI_TRANSPORT_TESTING_PIPE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/common/fd.h"
#include "xla_ffi/transport/testing/loopback.h"
#include "xla_ffi/transport/transport.h"

namespace hetccl::transport::testing {

enum class Side { kSender = 0, kReceiver = 1 };

// Thread-safe. Shared by both halves; wakes a half through its eventfd whenever the other did
// something.
class Pipe {
 public:
  Pipe(size_t capacity, const Faults& faults);

  // Both move at most `size` bytes and return how many.
  size_t Write(const std::byte* data, size_t size);
  size_t Read(std::byte* data, size_t size);

  // How often the sender began and the receiver accepted a message.
  void CountAccepted();
  uint64_t accepted() const;

  void SayGoodbye(Side side);
  void Close(Side side);  // the half is gone
  PeerState PeerOf(Side side) const;
  bool broken() const;
  int fd(Side side) const { return wake_[static_cast<int>(side)].get(); }

 private:
  void Wake(Side side);
  // How much may move now under the faults. Requires mutex_.
  size_t Allowed(size_t size, TimePoint* last);
  static Side Other(Side side) { return side == Side::kSender ? Side::kReceiver : Side::kSender; }

  const Faults faults_;
  std::array<UniqueFd, 2> wake_;
  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::vector<std::byte> ring_;
  uint64_t written_ = 0;
  uint64_t read_ = 0;
  uint64_t accepted_ = 0;
  bool broken_ = false;
  std::array<bool, 2> goodbye_ = {false, false};
  std::array<bool, 2> closed_ = {false, false};
  TimePoint last_write_{};
  TimePoint last_read_{};
};

}  // namespace hetccl::transport::testing

#endif  // XLA_FFI_TRANSPORT_TESTING_PIPE_H_
