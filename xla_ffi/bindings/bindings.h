// One function for each part of the Python module.
#ifndef XLA_FFI_BINDINGS_BINDINGS_H_
#define XLA_FFI_BINDINGS_BINDINGS_H_

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <utility>

#include "xla_ffi/exchange/engine.h"

namespace hetccl::bindings {

// What Python holds. The handlers hold the engine too while it is the current one; it closes when
// the last of them lets go.
struct EngineObject {
  std::shared_ptr<Engine> engine;
  const std::string stream_sync;  // for the GPUs that it will be told of

  EngineObject(std::shared_ptr<Engine> engine, std::string stream_sync)
      : engine(std::move(engine)), stream_sync(std::move(stream_sync)) {}
  EngineObject(const EngineObject&) = delete;
  ~EngineObject();
};

void DefineEngine(nanobind::module_& module);
void DefineHandlers(nanobind::module_& module);
void DefineTransports(nanobind::module_& module);

}  // namespace hetccl::bindings

#endif  // XLA_FFI_BINDINGS_BINDINGS_H_
