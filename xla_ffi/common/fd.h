// A file descriptor with one owner.
#ifndef XLA_FFI_COMMON_FD_H_
#define XLA_FFI_COMMON_FD_H_

#include <unistd.h>

#include <utility>

namespace hetccl {

// Closes the descriptor when destroyed. Movable, not copyable; -1 means empty.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

// Puts the descriptor into non-blocking mode; false (with errno) if that fails.
bool SetNonBlocking(int fd);

}  // namespace hetccl

#endif  // XLA_FFI_COMMON_FD_H_
