#include "xla_ffi/common/status.h"

#include <system_error>

namespace hetccl {
namespace {

constexpr const char* kNames[] = {"peer_lost", "corrupt", "mismatch",
                                  "timeout",   "aborted", "internal"};

}  // namespace

const char* KindName(ErrorKind kind) { return kNames[static_cast<int>(kind)]; }

ErrorKind KindFromName(std::string_view name) {
  for (int i = 0; i <= static_cast<int>(ErrorKind::kInternal); ++i) {
    if (name == kNames[i]) return static_cast<ErrorKind>(i);
  }
  return ErrorKind::kInternal;
}

std::string ErrnoMessage(std::string_view what, int error_number) {
  return std::string(what) + ": " + std::generic_category().message(error_number);
}

}  // namespace hetccl
