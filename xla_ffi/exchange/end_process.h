// The last resort: the end of this process.
#ifndef XLA_FFI_EXCHANGE_END_PROCESS_H_
#define XLA_FFI_EXCHANGE_END_PROCESS_H_

#include <string>

#include "xla_ffi/common/status.h"

namespace hetccl {

// Ends the process at once, with the failure and the reason on stderr and exit status 1: going on
// would let the program compute with, or free, memory that is not what it takes it for.
[[noreturn]] void EndProcess(const Status& failure, const std::string& why);

}  // namespace hetccl

#endif  // XLA_FFI_EXCHANGE_END_PROCESS_H_
