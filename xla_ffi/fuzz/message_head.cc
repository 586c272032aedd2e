// A message's header, and the error that shows it to people beside what was expected.
#include "xla_ffi/exchange/matching.h"
#include "xla_ffi/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace hetccl;
  fuzz::Input input(data, size);
  const uint8_t same = input.Byte();
  auto head = std::make_unique<transport::WireHeader>();
  input.Copy(head.get(), sizeof(*head));
  const std::string shown = transport::Text(*head);
  fuzz::Require(shown.size() <= sizeof(head->text));
  for (const char c : shown) fuzz::Require(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f);
  if (!transport::CheckHeader(*head).ok()) return 0;
  // Each bit of the first byte makes one thing differ.
  const std::string text = "psum over \"data\", float32[8]";
  auto maybe = [&](int bit, auto value) {
    return (same >> bit & 1) != 0 ? static_cast<decltype(value)>(value + 1) : value;
  };
  const Expected expected = {maybe(0, head->epoch),
                             maybe(1, head->program),
                             maybe(2, head->index),
                             maybe(3, head->occurrence),
                             maybe(4, head->wire_id),
                             maybe(5, head->payload_bytes),
                             &text};
  const Verdict verdict = Judge(*head, expected);
  // A message of another world, or of another size, is never taken.
  if ((same & 0b111111) == 0) fuzz::Require(verdict == Verdict::kMatch);
  if ((same & 0b111111) != 0) fuzz::Require(verdict != Verdict::kMatch);
  Directory directory;
  const std::string told = DescribeMismatch(*head, expected, "left/0", "right/0", directory);
  fuzz::Require(!told.empty() && told.size() < 4096);
  for (const char c : told) {
    fuzz::Require(static_cast<unsigned char>(c) >= 0x20 || c == '\n');
  }
  return 0;
}
