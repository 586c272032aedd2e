#include "xla_ffi/common/fd.h"

#include <fcntl.h>

namespace hetccl {

bool SetNonBlocking(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0;
}

}  // namespace hetccl
