// Names for people: ranks and programs.
#ifndef XLA_FFI_EXCHANGE_DIRECTORY_H_
#define XLA_FFI_EXCHANGE_DIRECTORY_H_

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>

namespace hetccl {

// Thread-safe. A rank or program without a name shows as its number.
class Directory {
 public:
  void SetRank(uint32_t rank, std::string name);
  void SetProgram(uint64_t program, std::string text);
  // "left/0 rank 2"
  std::string Rank(uint32_t rank) const;
  // "program 1f3a (train_step)"
  std::string Program(uint64_t program) const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<uint32_t, std::string> ranks_;
  std::unordered_map<uint64_t, std::string> programs_;
};

}  // namespace hetccl

#endif  // XLA_FFI_EXCHANGE_DIRECTORY_H_
