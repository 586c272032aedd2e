#include "xla_ffi/handlers/handlers.h"

#include <nanobind/stl/string.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "xla_ffi/bindings/bindings.h"
#include "xla_ffi/exchange/engine.h"
#include "xla_ffi/handlers/current_engine.h"

namespace hetccl::bindings {

namespace nb = nanobind;

namespace {

using Handler = XLA_FFI_Error* (*)(XLA_FFI_CallFrame*);

struct Target {
  const char* name;
  Handler cpu;
  Handler gpu;
};

constexpr Target kTargets[] = {
    {"hetccl_exchange_start", HetcclExchangeStart, HetcclGpuExchangeStart},
    {"hetccl_exchange_done", HetcclExchangeDone, HetcclGpuExchangeDone},
    {"hetccl_check", HetcclCheck, HetcclGpuCheck},
    {"hetccl_status", HetcclStatus, HetcclGpuStatus},
};

// The same for both vendors: what differs is the device that the engine knows by its ordinal.
nb::dict Registrations(const std::string& platform) {
  if (platform != "cpu" && platform != "CUDA" && platform != "ROCM") {
    throw std::runtime_error("hetccl: no handlers for platform \"" + platform +
                             "\"; known ones: cpu, CUDA, ROCM");
  }
  nb::dict all;
  for (const Target& target : kTargets) {
    all[target.name] =
        nb::capsule(reinterpret_cast<void*>(platform == "cpu" ? target.cpu : target.gpu));
  }
  return all;
}

}  // namespace

void DefineHandlers(nb::module_& module) {
  module.def("registrations", &Registrations, nb::arg("platform") = "cpu");
  module.def(
      "set_engine",
      [](EngineObject* engine) {
        std::shared_ptr<Engine> next = engine ? engine->engine : nullptr;
        nb::gil_scoped_release release;  // the former engine may end here, and joins its threads
        handlers::SetCurrentEngine(std::move(next));
      },
      nb::arg("engine").none());
}

}  // namespace hetccl::bindings
