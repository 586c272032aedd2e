#include "xla_ffi/exchange/matching.h"

#include <cstdio>

namespace hetccl {
namespace {

std::string Side(const std::string& text, uint64_t bytes, uint32_t index, uint64_t occurrence,
                 const std::string& program) {
  return text + " (" + std::to_string(bytes) + " bytes, exchange #" + std::to_string(index) +
         " of " + program + ", run " + std::to_string(occurrence) + ")";
}

}  // namespace

Verdict Judge(const transport::WireHeader& head, const Expected& expected) {
  if (head.epoch != expected.epoch) return Verdict::kMismatch;
  if (head.program != expected.program) return Verdict::kOtherProgram;
  const bool same = head.index == expected.index && head.occurrence == expected.occurrence &&
                    head.wire_id == expected.wire_id && head.payload_bytes == expected.bytes;
  return same ? Verdict::kMatch : Verdict::kMismatch;
}

std::string DescribeMismatch(const transport::WireHeader& head, const Expected& expected,
                             const std::string& sender, const std::string& receiver,
                             const Directory& directory, std::optional<Duration> waited) {
  if (head.epoch != expected.epoch) {
    return sender + " sent " + transport::Text(head) + " of another world to " + receiver +
           ", which expected " + *expected.text +
           "; stop processes left over from an earlier run and start all clusters again";
  }
  std::string text =
      sender + " sent " +
      Side(transport::Text(head), head.payload_bytes, head.index, head.occurrence,
           directory.Program(head.program)) +
      " but " + receiver + " expected " +
      Side(*expected.text, expected.bytes, expected.index, expected.occurrence,
           directory.Program(expected.program)) +
      "; every cluster must run the same collectives in the same order, with the same shapes "
      "and dtypes";
  if (waited) {
    char seconds[32];
    std::snprintf(seconds, sizeof(seconds), "%.3g s", ToSeconds(*waited));
    text += std::string("; the message has waited ") + seconds +
            " for its program to start at the receiver: run all programs with spanning axes in "
            "one thread of each process";
  }
  return text;
}

}  // namespace hetccl
