// The one clock that bounds and statistics use.
#ifndef XLA_FFI_COMMON_CLOCK_H_
#define XLA_FFI_COMMON_CLOCK_H_

#include <chrono>
#include <cstdint>

namespace hetccl {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Duration = Clock::duration;

inline Duration Seconds(double seconds) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

inline double ToSeconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace hetccl

#endif  // XLA_FFI_COMMON_CLOCK_H_
