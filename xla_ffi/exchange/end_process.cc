#include "xla_ffi/exchange/end_process.h"

#include <unistd.h>

#include <cstdio>

namespace hetccl {

void EndProcess(const Status& failure, const std::string& why) {
  std::fprintf(stderr, "hetccl %s: %s\nhetccl: %s\n", KindName(failure.kind()),
               failure.message().c_str(), why.c_str());
  std::fflush(stderr);
  ::_exit(1);
}

}  // namespace hetccl
