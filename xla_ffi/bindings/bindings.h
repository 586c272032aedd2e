// One function for each part of the Python module.
#ifndef XLA_FFI_BINDINGS_BINDINGS_H_
#define XLA_FFI_BINDINGS_BINDINGS_H_

#include <nanobind/nanobind.h>

#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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

// Sections of some of an engine's GPUs. Not thread-safe; outlives the engine.
class SectionObject {
 public:
  // Ordinals of devices that are no GPUs do not count.
  SectionObject(Engine& engine, const std::vector<int>& ordinals);
  SectionObject(const SectionObject&) = delete;
  // False: a stream was still held at the end; the sections are open all the same.
  bool Enter(double timeout_s);
  void Leave() { open_.clear(); }

 private:
  std::vector<std::shared_ptr<device::StreamSpace>> gpus_;
  std::list<device::Section> open_;
};

void DefineEngine(nanobind::module_& module);
void DefineHandlers(nanobind::module_& module);
void DefineTransports(nanobind::module_& module);

}  // namespace hetccl::bindings

#endif  // XLA_FFI_BINDINGS_BINDINGS_H_
