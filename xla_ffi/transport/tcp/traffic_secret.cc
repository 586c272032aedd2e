#include "xla_ffi/transport/tcp/traffic_secret.h"

#include <cstring>
#include <string>
#include <utility>

namespace hetccl::transport::tcp {
namespace {

// A line: this label, the client's random bytes, and the secret, in hexadecimal digits.
constexpr std::string_view kLabel = "CLIENT_TRAFFIC_SECRET_0 ";

// -1: not a digit.
int Digit(char digit) {
  if (digit >= '0' && digit <= '9') return digit - '0';
  if (digit >= 'a' && digit <= 'f') return digit - 'a' + 10;
  if (digit >= 'A' && digit <= 'F') return digit - 'A' + 10;
  return -1;
}

}  // namespace

TrafficKey::~TrafficKey() {
  ::explicit_bzero(key, sizeof(key));
  ::explicit_bzero(iv, sizeof(iv));
}

TrafficSecret::TrafficSecret(TrafficSecret&& other) noexcept
    : known_(std::exchange(other.known_, false)) {
  std::memcpy(secret_, other.secret_, kBytes);
  ::explicit_bzero(other.secret_, kBytes);
}

TrafficSecret::~TrafficSecret() { ::explicit_bzero(secret_, kBytes); }

void TrafficSecret::Read(std::string_view line) {
  if (line.substr(0, kLabel.size()) != kLabel) return;
  const std::string_view digits = line.substr(line.rfind(' ') + 1);
  if (digits.size() != 2 * kBytes) return;
  for (const char digit : digits) {
    if (Digit(digit) < 0) return;
  }
  for (size_t i = 0; i < kBytes; ++i) {
    secret_[i] = static_cast<unsigned char>(Digit(digits[2 * i]) << 4 | Digit(digits[2 * i + 1]));
  }
  known_ = true;
}

bool TrafficSecret::Derive(const openssl::Library& library, TrafficKey* key) const {
  return Expand(library, "key", key->key, sizeof(key->key)) &&
         Expand(library, "iv", key->iv, sizeof(key->iv));
}

bool TrafficSecret::Advance(const openssl::Library& library) {
  return Expand(library, "traffic upd", secret_, kBytes);
}

bool TrafficSecret::Expand(const openssl::Library& library, std::string_view label,
                           unsigned char* out, size_t bytes) const {
  const std::string name = "tls13 " + std::string(label);
  std::string info = {0, static_cast<char>(bytes), static_cast<char>(name.size())};
  info += name;
  info += '\0';    // an empty context
  info += '\x01';  // the first block, which is all that so few bytes need
  unsigned char block[kBytes];
  const auto* data = reinterpret_cast<const unsigned char*>(info.data());
  const bool done = library.hmac(library.evp_sha256(), secret_, static_cast<int>(kBytes), data,
                                 info.size(), block, nullptr) != nullptr;
  if (done) std::memcpy(out, block, bytes);
  ::explicit_bzero(block, sizeof(block));
  return done;
}

}  // namespace hetccl::transport::tcp
