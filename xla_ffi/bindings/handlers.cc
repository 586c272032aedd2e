#include "xla_ffi/handlers/handlers.h"

#include <memory>
#include <utility>

#include "xla_ffi/bindings/bindings.h"
#include "xla_ffi/exchange/engine.h"
#include "xla_ffi/handlers/current_engine.h"

namespace hetccl::bindings {

namespace nb = nanobind;

namespace {

nb::dict Registrations() {
  nb::dict all;
  const auto add = [&all](const char* name, XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
    all[name] = nb::capsule(reinterpret_cast<void*>(handler));
  };
  add("hetccl_exchange_start", HetcclExchangeStart);
  add("hetccl_exchange_done", HetcclExchangeDone);
  add("hetccl_check", HetcclCheck);
  add("hetccl_status", HetcclStatus);
  return all;
}

}  // namespace

void DefineHandlers(nb::module_& module) {
  module.def("registrations", &Registrations);
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
