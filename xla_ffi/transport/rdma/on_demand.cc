#include "xla_ffi/transport/rdma/on_demand.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <thread>
#include <vector>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/transport/rdma/queue_pair.h"
#include "xla_ffi/transport/rdma/wire.h"

namespace hetccl::transport::rdma {
namespace {

constexpr Duration kTrialBound = std::chrono::seconds(5);
constexpr auto kBetweenPolls = std::chrono::microseconds(50);
// A packet that is lost within one machine is sent again after 67 ms.
constexpr int kTrialTimeout = 14;
constexpr int kTrialRetries = 6;
// Users' buffers begin and end anywhere in a page.
constexpr size_t kOffset = 1000;
constexpr size_t kBeyondTwoPages = 100;

// What ibv_query_device_ex of verbs.h does inline. ENOSYS where library or provider lack it.
int QueryDevice(abi::Context* context, abi::DeviceAttrEx* attr) {
  if (reinterpret_cast<uintptr_t>(context->abi_compat) != abi::kExtended) return ENOSYS;
  auto* extended = reinterpret_cast<abi::ExtendedContext*>(reinterpret_cast<std::byte*>(context) -
                                                           offsetof(abi::ExtendedContext, context));
  if (extended->size < sizeof(*extended) || extended->query_device_ex == nullptr) return ENOSYS;
  return extended->query_device_ex(context, nullptr, attr, sizeof(*attr));
}

std::string WhyNotCapable(abi::Context* context) {
  abi::DeviceAttrEx attr = {};
  if (int error = QueryDevice(context, &attr)) {
    return ErrnoMessage("its driver does not say whether it has on-demand paging", error);
  }
  if ((attr.odp_caps.general_caps & abi::kOdpSupport) == 0) {
    return "the device, or its driver in this kernel, has no on-demand paging";
  }
  if ((attr.odp_caps.rc_odp_caps & abi::kOdpSupportWrite) == 0) {
    return "the device has on-demand paging, but not for RDMA writes of reliable connections";
  }
  return "";
}

// Some pages of memory, a part of which is registered.
class Pages {
 public:
  Pages() : page_(static_cast<size_t>(::sysconf(_SC_PAGESIZE))), data_(Map(nullptr, 0)) {}
  ~Pages() {
    if (mapped()) ::munmap(data_, size());
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  bool mapped() const { return data_ != MAP_FAILED; }
  // Puts other pages, all zero, at the same address.
  bool MapAnew() { return Map(data_, MAP_FIXED) != MAP_FAILED; }
  std::byte* part() const { return static_cast<std::byte*>(data_) + kOffset; }
  size_t part_bytes() const { return 2 * page_ + kBeyondTwoPages; }
  std::vector<std::byte> contents() const {
    const auto* begin = static_cast<const std::byte*>(data_);
    return {begin, begin + size()};
  }
  Status Register(const std::shared_ptr<Device>& device, int access) {
    Status status =
        device->Register(part(), part_bytes(), access | abi::kAccessOnDemand, &registration_);
    if (status.ok()) registration_->DoNotKeep();
    return status;
  }
  const Registration& registration() const { return *registration_; }

 private:
  size_t size() const { return 4 * page_; }
  void* Map(void* at, int flags) const {
    return ::mmap(at, size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  }

  const size_t page_;
  void* const data_;
  std::shared_ptr<Registration> registration_;
};

// Two queue pairs of one port that are connected with each other.
class Loop {
 public:
  Status Make(const std::shared_ptr<Device>& device, Options options) {
    options.timeout = kTrialTimeout;
    options.retry_count = kTrialRetries;
    for (int i : {0, 1}) {
      records_[i].flags = kPagesOnDemand;
      Status status = QueuePair::Make(device, options, {/*writes=*/2, /*receives=*/1}, &records_[i],
                                      &pairs_[i]);
      if (!status.ok()) return status;
    }
    Status status = pairs_[0]->Connect(records_[0], records_[1]);
    return status.ok() ? pairs_[1]->Connect(records_[1], records_[0]) : status;
  }

  // Writes and waits for the end.
  Status Move(const Pages& from, const Pages& to) {
    Status status =
        pairs_[0]->Post({from.part(), from.registration().lkey(), from.part_bytes(),
                         reinterpret_cast<uint64_t>(to.part()), to.registration().rkey()});
    std::vector<Completion> ended;
    const TimePoint deadline = Clock::now() + kTrialBound;
    while (status.ok() && ended.empty()) {
      if (Clock::now() > deadline) return InternalError("it did not end");
      std::this_thread::sleep_for(kBetweenPolls);
      status = pairs_[0]->Poll(&ended);
    }
    return status;
  }

 private:
  EndpointRecord records_[2];
  std::unique_ptr<QueuePair> pairs_[2];
};

std::string WhyNotWorking(const std::shared_ptr<Device>& device, const Options& options) {
  const std::string but = "the device says that it has on-demand paging, but ";
  Pages from, to;
  if (!from.mapped() || !to.mapped()) return ErrnoMessage("no memory to try it with", errno);
  Status status = from.Register(device, 0);
  if (status.ok()) {
    status = to.Register(device, abi::kAccessLocalWrite | abi::kAccessRemoteWrite);
  }
  if (!status.ok()) return but + "a registration failed: " + status.message();
  Loop loop;  // gone before the memory
  if (status = loop.Make(device, options); !status.ok()) {
    return "on-demand paging could not be tried: " + status.message();
  }
  for (const bool anew : {false, true}) {
    if (anew && !(from.MapAnew() && to.MapAnew())) {
      return ErrnoMessage("no memory to try it with", errno);
    }
    for (size_t i = 0; i < from.part_bytes(); ++i) {
      from.part()[i] = static_cast<std::byte>(i % 251 + (anew ? 1 : 0));
    }
    std::vector<std::byte> expected = to.contents();
    std::copy_n(from.part(), from.part_bytes(), expected.begin() + kOffset);
    if (status = loop.Move(from, to); !status.ok()) {
      return but + "a write that tried it failed: " + status.message();
    }
    if (to.contents() != expected) {
      return but + (anew ? "it did not follow memory that was mapped anew"
                         : "a write that tried it put bytes in the wrong places");
    }
  }
  return "";
}

}  // namespace

std::string TryOnDemand(const std::shared_ptr<Device>& device, const Options& options) {
  const std::string why_not = WhyNotCapable(device->context());
  return why_not.empty() ? WhyNotWorking(device, options) : why_not;
}

}  // namespace hetccl::transport::rdma
