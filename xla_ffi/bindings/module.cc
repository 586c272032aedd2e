// The Python module jax_hetccl._native. Contracts stand in _native.pyi.
#include <nanobind/nanobind.h>

#include "xla_ffi/bindings/bindings.h"
#include "xla_ffi/device/host_memory.h"
#include "xla_ffi/transport/message.h"

NB_MODULE(_native, module) {
  module.doc() = "The native half of jax_hetccl: the exchange engine and its XLA handlers.";
  module.def("protocol_version", [] { return int{hetccl::transport::kProtocolVersion}; });
  module.def("keep_freed_memory", &hetccl::device::KeepFreedMemory, nanobind::arg("bytes"));
  hetccl::bindings::DefineEngine(module);
  hetccl::bindings::DefineHandlers(module);
  hetccl::bindings::DefineTransports(module);
}
