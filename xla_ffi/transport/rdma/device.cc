#include "xla_ffi/transport/rdma/device.h"

#include <sys/resource.h>

#include <cerrno>
#include <utility>

namespace hetccl::transport::rdma {
namespace {

// What usually is behind a registration that fails.
std::string RegisterError(const std::string& device, size_t bytes, int error) {
  std::string text = ErrnoMessage(
      "rdma " + device + ": registering " + std::to_string(bytes) + " bytes of memory", error);
  rlimit limit = {};
  if (error == ENOMEM && ::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 &&
      limit.rlim_cur != RLIM_INFINITY) {
    text += "; this process may lock " + std::to_string(limit.rlim_cur / 1024) +
            " KB (ulimit -l): raise it, in containers with --ulimit memlock=-1";
  }
  return text;
}

Status FindAndOpen(const Verbs& verbs, const std::string& name, abi::Context** context) {
  int count = 0;
  abi::Device** list = verbs.get_device_list(&count);
  std::string known;
  *context = nullptr;
  int error = ENODEV;
  for (int i = 0; list != nullptr && i < count; ++i) {
    known += (known.empty() ? "" : ", ") + std::string(list[i]->name);
    if (name != list[i]->name) continue;
    errno = 0;
    *context = verbs.open_device(list[i]);
    error = errno;
  }
  if (list != nullptr) verbs.free_device_list(list);
  if (*context != nullptr) return Status();
  if (error != ENODEV) return InternalError(ErrnoMessage("opening RDMA device " + name, error));
  return InternalError("there is no RDMA device \"" + name +
                       "\"; known ones: " + (known.empty() ? "none" : known));
}

}  // namespace

Registration::Registration(std::shared_ptr<Device> device, abi::Mr* mr, int access)
    : device_(std::move(device)),
      mr_(mr),
      access_(access),
      keep_((access & abi::kAccessOnDemand) != 0) {}

Registration::~Registration() {
  if (keep_.load(std::memory_order_relaxed)) {
    device_->Keep(mr_, access_);
  } else {
    device_->verbs().dereg_mr(mr_);
  }
}

Status Device::Open(const std::string& name, std::shared_ptr<Device>* device) {
  const Verbs* verbs = nullptr;
  if (Status status = LoadVerbs(&verbs); !status.ok()) return status;
  static std::mutex mutex;
  static auto* opened = new std::map<std::string, std::weak_ptr<Device>>();
  std::lock_guard<std::mutex> lock(mutex);
  auto& entry = (*opened)[name];
  if ((*device = entry.lock()) != nullptr) return Status();
  abi::Context* context = nullptr;
  if (Status status = FindAndOpen(*verbs, name, &context); !status.ok()) return status;
  abi::Pd* pd = verbs->alloc_pd(context);
  if (pd == nullptr) {
    const Status status =
        InternalError(ErrnoMessage("rdma " + name + ": protection domain", errno));
    verbs->close_device(context);
    return status;
  }
  *device = std::make_shared<Device>(*verbs, context, pd, name);
  entry = *device;
  return Status();
}

Device::Device(const Verbs& verbs, abi::Context* context, abi::Pd* pd, std::string name)
    : verbs_(verbs), context_(context), pd_(pd), name_(std::move(name)) {}

Device::~Device() {
  while (abi::Mr* mr = kept_.TakeAny()) verbs_.dereg_mr(mr);
  verbs_.dealloc_pd(pd_);
  verbs_.close_device(context_);
}

const std::string& Device::WhyNotOnDemand(const std::function<std::string()>& ask) {
  std::call_once(asked_on_demand_, [&] { why_not_on_demand_ = ask(); });
  return why_not_on_demand_;
}

Status Device::Register(void* data, size_t bytes, int access,
                        std::shared_ptr<Registration>* registration) {
  const RegistrationKey key(data, bytes, access);
  abi::Mr* mr = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = shared_.find(key);
    if (it != shared_.end() && (*registration = it->second.lock()) != nullptr) return Status();
    mr = kept_.Take(key);
  }
  const bool made = mr == nullptr;
  if (made) {
    errno = 0;
    mr = verbs_.reg_mr(pd_, data, bytes, access);
    if (mr == nullptr) return InternalError(RegisterError(name_, bytes, errno));
  }
  *registration = std::make_shared<Registration>(shared_from_this(), mr, access);
  // Whoever registered the same meanwhile keeps its own.
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = shared_.begin(); it != shared_.end();) {
    it = it->second.expired() ? shared_.erase(it) : std::next(it);
  }
  shared_[key] = *registration;
  if (made) ++registrations_;
  return Status();
}

void Device::Keep(abi::Mr* mr, int access) {
  abi::Mr* dropped = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    dropped = kept_.Put({mr->addr, mr->length, access}, mr);
  }
  if (dropped != nullptr) verbs_.dereg_mr(dropped);
}

Status Device::RegisterDmabuf(int fd, uint64_t offset, size_t bytes, uint64_t iova, int access,
                              std::shared_ptr<Registration>* registration) {
  if (verbs_.reg_dmabuf_mr == nullptr) {
    return InternalError("rdma " + name_ +
                         ": libibverbs lacks ibv_reg_dmabuf_mr (rdma-core 34 or newer has it)");
  }
  errno = 0;
  abi::Mr* mr = verbs_.reg_dmabuf_mr(pd_, offset, bytes, iova, fd, access);
  if (mr == nullptr) {
    return InternalError(ErrnoMessage("rdma " + name_ + ": registering a dma-buf", errno));
  }
  *registration = std::make_shared<Registration>(shared_from_this(), mr, access);
  std::lock_guard<std::mutex> lock(mutex_);
  ++registrations_;
  return Status();
}

uint64_t Device::registrations() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return registrations_;
}

}  // namespace hetccl::transport::rdma
