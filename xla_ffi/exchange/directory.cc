#include "xla_ffi/exchange/directory.h"

#include <cstdio>
#include <utility>

namespace hetccl {

void Directory::SetRank(uint32_t rank, std::string name) {
  std::lock_guard<std::mutex> lock(mutex_);
  ranks_[rank] = std::move(name);
}

void Directory::SetProgram(uint64_t program, std::string text) {
  std::lock_guard<std::mutex> lock(mutex_);
  programs_[program] = std::move(text);
}

std::string Directory::Rank(uint32_t rank) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = ranks_.find(rank);
  return it != ranks_.end() ? it->second : "rank " + std::to_string(rank);
}

std::string Directory::Program(uint64_t program) const {
  char number[32];
  std::snprintf(number, sizeof(number), "program %llx", static_cast<unsigned long long>(program));
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = programs_.find(program);
  return it != programs_.end() ? std::string(number) + " (" + it->second + ")" : number;
}

}  // namespace hetccl
