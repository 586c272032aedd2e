// The engine that the handlers of this process use.
#ifndef XLA_FFI_HANDLERS_CURRENT_ENGINE_H_
#define XLA_FFI_HANDLERS_CURRENT_ENGINE_H_

#include <memory>

#include "xla_ffi/exchange/engine.h"

namespace hetccl::handlers {

// XLA calls handlers with nothing but a call frame, and compiled programs must not carry pointers,
// so the process has one current engine. Thread-safe. A handler keeps the engine alive while it
// runs; null means that there is no world.
void SetCurrentEngine(std::shared_ptr<Engine> engine);
std::shared_ptr<Engine> CurrentEngine();

}  // namespace hetccl::handlers

#endif  // XLA_FFI_HANDLERS_CURRENT_ENGINE_H_
