// Errors that cross threads: a kind that programs switch on and a message that people read.
#ifndef XLA_FFI_COMMON_STATUS_H_
#define XLA_FFI_COMMON_STATUS_H_

#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace hetccl {

// What went wrong with a world. A process keeps the first error that it notices; which of several
// processes' errors the world ends with is settled where they agree, not here.
enum class ErrorKind { kPeerLost = 0, kCorrupt, kMismatch, kTimeout, kAborted, kInternal };

// The name that Python sees: "peer_lost", "corrupt", "mismatch", "timeout", "aborted", "internal".
const char* KindName(ErrorKind kind);
// The kind of this name; kInternal for a name that is not one of ours.
ErrorKind KindFromName(std::string_view name);

// Success, or one error. Immutable and cheap to copy; copies may be used on any thread.
class [[nodiscard]] Status {
 public:
  Status() = default;
  // `lost_rank` is the rank whose process is gone, if that is what the error says.
  Status(ErrorKind kind, std::string message, int lost_rank = -1)
      : error_(std::make_shared<const Error>(Error{kind, std::move(message), lost_rank})) {}

  bool ok() const { return error_ == nullptr; }
  // These require !ok().
  ErrorKind kind() const { return error_->kind; }
  const std::string& message() const { return error_->message; }
  int lost_rank() const { return error_->lost_rank; }  // -1: none

 private:
  struct Error {
    ErrorKind kind;
    std::string message;
    int lost_rank;
  };
  std::shared_ptr<const Error> error_;
};

inline Status InternalError(std::string message) {
  return Status(ErrorKind::kInternal, std::move(message));
}

// A message with the text of `error_number` (an errno value): "connect: Connection refused".
std::string ErrnoMessage(std::string_view what, int error_number);

}  // namespace hetccl

#endif  // XLA_FFI_COMMON_STATUS_H_
