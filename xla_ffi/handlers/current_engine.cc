#include "xla_ffi/handlers/current_engine.h"

#include <mutex>
#include <utility>

namespace hetccl::handlers {
namespace {

std::mutex mutex;

// Guarded by mutex. Never destroyed: threads of XLA may still run when the process ends.
std::shared_ptr<Engine>& Current() {
  static auto* current = new std::shared_ptr<Engine>();
  return *current;
}

}  // namespace

void SetCurrentEngine(std::shared_ptr<Engine> engine) {
  std::lock_guard<std::mutex> lock(mutex);
  Current().swap(engine);
}

std::shared_ptr<Engine> CurrentEngine() {
  std::lock_guard<std::mutex> lock(mutex);
  return Current();
}

}  // namespace hetccl::handlers
