#include "xla_ffi/transport/rdma/verbs.h"

#include <dlfcn.h>

namespace hetccl::transport::rdma {
namespace {

constexpr char kLibrary[] = "libibverbs.so.1";
constexpr char kOldest[] = "rdma-core 33 or newer; Debian: apt-get install ibverbs-providers";

// Each symbol with the version whose signature we know. Several exist twice, IBVERBS_1.0 being an
// older ABI with other structs, and which of them an unversioned look-up finds is the C library's
// choice.
class Binder {
 public:
  explicit Binder(void* handle) : handle_(handle) {}

  template <typename Function>
  void Needed(Function** function, const char* name, const char* version) {
    *function = reinterpret_cast<Function*>(::dlvsym(handle_, name, version));
    if (*function != nullptr) return;
    missing_ += missing_.empty() ? "" : ", ";
    missing_ += std::string(name) + "@" + version;
  }

  const std::string& missing() const { return missing_; }

 private:
  void* const handle_;
  std::string missing_;
};

}  // namespace

Status LoadVerbsFrom(const std::string& library, Verbs* verbs) {
  *verbs = Verbs();
  void* handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = ::dlerror();
    return InternalError("no RDMA: " + std::string(reason != nullptr ? reason : library.c_str()) +
                         " (" + kOldest + ")");
  }
  Binder bind(handle);
  bind.Needed(&verbs->get_device_list, "ibv_get_device_list", "IBVERBS_1.1");
  bind.Needed(&verbs->free_device_list, "ibv_free_device_list", "IBVERBS_1.1");
  bind.Needed(&verbs->open_device, "ibv_open_device", "IBVERBS_1.1");
  bind.Needed(&verbs->close_device, "ibv_close_device", "IBVERBS_1.1");
  bind.Needed(&verbs->query_port, "ibv_query_port", "IBVERBS_1.1");
  bind.Needed(&verbs->query_gid_table, "_ibv_query_gid_table", "IBVERBS_1.11");
  bind.Needed(&verbs->query_gid_ex, "_ibv_query_gid_ex", "IBVERBS_1.11");
  bind.Needed(&verbs->alloc_pd, "ibv_alloc_pd", "IBVERBS_1.1");
  bind.Needed(&verbs->dealloc_pd, "ibv_dealloc_pd", "IBVERBS_1.1");
  bind.Needed(&verbs->reg_mr, "ibv_reg_mr", "IBVERBS_1.1");
  bind.Needed(&verbs->dereg_mr, "ibv_dereg_mr", "IBVERBS_1.1");
  bind.Needed(&verbs->create_comp_channel, "ibv_create_comp_channel", "IBVERBS_1.0");
  bind.Needed(&verbs->destroy_comp_channel, "ibv_destroy_comp_channel", "IBVERBS_1.0");
  bind.Needed(&verbs->create_cq, "ibv_create_cq", "IBVERBS_1.1");
  bind.Needed(&verbs->destroy_cq, "ibv_destroy_cq", "IBVERBS_1.1");
  bind.Needed(&verbs->get_cq_event, "ibv_get_cq_event", "IBVERBS_1.1");
  bind.Needed(&verbs->ack_cq_events, "ibv_ack_cq_events", "IBVERBS_1.1");
  bind.Needed(&verbs->create_qp, "ibv_create_qp", "IBVERBS_1.1");
  bind.Needed(&verbs->destroy_qp, "ibv_destroy_qp", "IBVERBS_1.1");
  bind.Needed(&verbs->modify_qp, "ibv_modify_qp", "IBVERBS_1.1");
  bind.Needed(&verbs->fork_init, "ibv_fork_init", "IBVERBS_1.1");
  if (!bind.missing().empty()) {
    return InternalError("no RDMA: " + library + " lacks " + bind.missing() + " (" + kOldest + ")");
  }
  // A preloaded library may stand in for this one symbol: some providers lack the function.
  void* dmabuf = ::dlsym(RTLD_DEFAULT, "ibv_reg_dmabuf_mr");
  if (dmabuf == nullptr) dmabuf = ::dlvsym(handle, "ibv_reg_dmabuf_mr", "IBVERBS_1.12");
  verbs->reg_dmabuf_mr = reinterpret_cast<decltype(verbs->reg_dmabuf_mr)>(dmabuf);
  // Without it a child process may take pinned pages away from this one. Does nothing on kernels
  // from 5.12 on, which copy such pages for the child.
  (void)verbs->fork_init();
  return Status();
}

Status LoadVerbs(const Verbs** verbs) {
  static Verbs loaded;
  static const Status status = LoadVerbsFrom(kLibrary, &loaded);
  *verbs = &loaded;
  return status;
}

}  // namespace hetccl::transport::rdma
