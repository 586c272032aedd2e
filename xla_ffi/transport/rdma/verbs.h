// libibverbs, opened when the process runs: neither building nor installing needs it.
#ifndef XLA_FFI_TRANSPORT_RDMA_VERBS_H_
#define XLA_FFI_TRANSPORT_RDMA_VERBS_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "xla_ffi/common/status.h"
#include "xla_ffi/transport/rdma/abi.h"

namespace hetccl::transport::rdma {

// Function pointers with the names of the library, without the ibv_.
struct Verbs {
  abi::Device** (*get_device_list)(int* count);
  void (*free_device_list)(abi::Device** list);
  abi::Context* (*open_device)(abi::Device* device);
  int (*close_device)(abi::Context* context);
  int (*query_port)(abi::Context* context, uint8_t port, abi::PortAttr* attr);
  ssize_t (*query_gid_table)(abi::Context* context, abi::GidEntry* entries, size_t max,
                             uint32_t flags, size_t entry_size);
  int (*query_gid_ex)(abi::Context* context, uint32_t port, uint32_t index, abi::GidEntry* entry,
                      uint32_t flags, size_t entry_size);
  abi::Pd* (*alloc_pd)(abi::Context* context);
  int (*dealloc_pd)(abi::Pd* pd);
  abi::Mr* (*reg_mr)(abi::Pd* pd, void* data, size_t bytes, int access);
  int (*dereg_mr)(abi::Mr* mr);
  abi::CompChannel* (*create_comp_channel)(abi::Context* context);
  int (*destroy_comp_channel)(abi::CompChannel* channel);
  abi::Cq* (*create_cq)(abi::Context* context, int entries, void* cq_context,
                        abi::CompChannel* channel, int vector);
  int (*destroy_cq)(abi::Cq* cq);
  int (*get_cq_event)(abi::CompChannel* channel, abi::Cq** cq, void** cq_context);
  void (*ack_cq_events)(abi::Cq* cq, unsigned count);
  abi::Qp* (*create_qp)(abi::Pd* pd, abi::QpInitAttr* attr);
  int (*destroy_qp)(abi::Qp* qp);
  int (*modify_qp)(abi::Qp* qp, abi::QpAttr* attr, int mask);
  int (*fork_init)();

  // Null where the library is older than rdma-core 34.
  abi::Mr* (*reg_dmabuf_mr)(abi::Pd* pd, uint64_t offset, size_t bytes, uint64_t iova, int fd,
                            int access);
};

// Opens the library once for the process; later calls return the same answer. The error names the
// library or the symbol that is missing and the version that has it.
Status LoadVerbs(const Verbs** verbs);
// The same without remembering, for a library of this name.
Status LoadVerbsFrom(const std::string& library, Verbs* verbs);

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_VERBS_H_
