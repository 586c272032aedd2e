// The u32[4] tokens that order exchanges in a program and name the running ones.
#ifndef XLA_FFI_HANDLERS_TOKEN_H_
#define XLA_FFI_HANDLERS_TOKEN_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace hetccl::handlers {

// Both the chain and the ticket have this form; the chain leaves the id alone.
struct Token {
  uint32_t id_low = 0;
  uint32_t id_high = 0;
  uint32_t reserved = 0;
  uint32_t failed = 0;  // not zero once an exchange before this point has failed

  static Token Load(const void* data) {
    Token token;
    std::memcpy(&token, data, sizeof(token));
    return token;
  }
  void Store(void* data) const { std::memcpy(data, this, sizeof(*this)); }

  uint64_t id() const { return static_cast<uint64_t>(id_high) << 32 | id_low; }
  void set_id(uint64_t id) {
    id_low = static_cast<uint32_t>(id);
    id_high = static_cast<uint32_t>(id >> 32);
  }
};
static_assert(sizeof(Token) == 16, "a token is a u32[4]");

}  // namespace hetccl::handlers

#endif  // XLA_FFI_HANDLERS_TOKEN_H_
