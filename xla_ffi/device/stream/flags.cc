#include "xla_ffi/device/stream/flags.h"

namespace hetccl::device {
namespace {

// A page of marks; each has its own cache line, as the device writes it while the host polls.
constexpr size_t kBlockBytes = 4096;
constexpr size_t kWordBytes = 64;

}  // namespace

Status MarkPool::Grow() {
  allocations_.calls.fetch_add(1);
  if (kind_ == MarkKind::kEvent) {
    auto mark = std::make_unique<Mark>();
    if (Status status = gpu_.EventCreate(&mark->event); !status.ok()) return status;
    free_.push_front(mark.get());
    all_.push_back(std::move(mark));
    allocations_.marks.fetch_add(1);
    return Status();
  }
  void* host = nullptr;
  void* device = nullptr;
  if (Status status = gpu_.MemHostAlloc(kBlockBytes, &host); !status.ok()) return status;
  allocations_.pinned_bytes.fetch_add(kBlockBytes);
  if (Status status = gpu_.MemHostGetDevicePointer(host, &device); !status.ok()) return status;
  for (size_t offset = 0; offset < kBlockBytes; offset += kWordBytes) {
    auto mark = std::make_unique<Mark>();
    mark->host = reinterpret_cast<uint32_t*>(static_cast<char*>(host) + offset);
    mark->device = static_cast<char*>(device) + offset;
    __atomic_store_n(mark->host, 0, __ATOMIC_RELEASE);
    free_.push_front(mark.get());
    all_.push_back(std::move(mark));
    allocations_.marks.fetch_add(1);
  }
  return Status();
}

Status MarkPool::Reserve(int count) {
  std::lock_guard<std::mutex> lock(mutex_);
  while (static_cast<int>(all_.size()) < count) {
    if (Status status = Grow(); !status.ok()) return status;
  }
  return Status();
}

Status MarkPool::Acquire(Mark** mark) {
  std::lock_guard<std::mutex> lock(mutex_);
  bool reached = false;
  if (!free_.empty()) {
    if (Status status = Reached(*free_.front(), &reached); !status.ok()) return status;
  }
  if (!reached) {
    // A mark whose exchange was given up may still stand in a stream.
    if (!free_.empty()) {
      free_.push_back(free_.front());
      free_.pop_front();
    }
    if (Status status = Grow(); !status.ok()) return status;  // in front
  }
  *mark = free_.front();
  free_.pop_front();
  return Status();
}

void MarkPool::Release(Mark* mark) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(mark);
}

Status MarkPool::Record(Mark* mark, Stream stream) {
  if (kind_ == MarkKind::kEvent) return gpu_.EventRecord(mark->event, stream);
  ++mark->value;
  return gpu_.StreamWriteValue32(stream, mark->device, mark->value);
}

Status MarkPool::Reached(const Mark& mark, bool* reached) const {
  if (kind_ == MarkKind::kEvent) return gpu_.EventQuery(mark.event, reached);
  const uint32_t word = __atomic_load_n(mark.host, __ATOMIC_ACQUIRE);
  *reached = static_cast<int32_t>(word - mark.value) >= 0;
  return Status();
}

Status FlagPool::Grow() {
  auto flag = std::make_unique<Flag>();
  flag->pool = this;
  if (sync_ == StreamSync::kMemops) {
    allocations_.calls.fetch_add(1);
    if (Status status = gpu_.SignalAlloc(&flag->signal); !status.ok()) return status;
    allocations_.pinned_bytes.fetch_add(kBlockBytes);
  }
  free_.push_back(flag.get());
  all_.push_back(std::move(flag));
  allocations_.flags.fetch_add(1);
  return Status();
}

Status FlagPool::Reserve(int count) {
  std::lock_guard<std::mutex> lock(mutex_);
  while (static_cast<int>(all_.size()) < count) {
    if (Status status = Grow(); !status.ok()) return status;
  }
  return Status();
}

Status FlagPool::Acquire(Flag** flag) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) {
    if (Status status = Grow(); !status.ok()) return status;
  }
  *flag = free_.back();
  free_.pop_back();
  return Status();
}

Status FlagPool::Hold(Flag* flag, Stream stream) {
  ++flag->value;
  if (sync_ == StreamSync::kMemops) {
    return gpu_.StreamWaitValue32(stream, flag->signal.device, flag->value, Compare::kAtLeast);
  }
  flag->released = false;  // nobody else has the flag
  return gpu_.LaunchHostFunc(stream, &FlagPool::WaitInHostFunction, flag);
}

void FlagPool::Release(Flag* flag) {
  if (sync_ == StreamSync::kMemops) {
    // A wait for this value that the stream has not come to yet stays satisfied when the flag is
    // used again: values only grow.
    __atomic_store_n(flag->signal.host, flag->value, __ATOMIC_RELEASE);
    Abandon(flag);
    return;
  }
  std::lock_guard<std::mutex> lock(flag->mutex);
  flag->released = true;
  flag->changed.notify_all();
  // The host function gives it back: until then it uses the flag.
}

void FlagPool::WaitInHostFunction(void* data) {
  Flag* flag = static_cast<Flag*>(data);
  {
    std::unique_lock<std::mutex> lock(flag->mutex);
    flag->changed.wait(lock, [flag] { return flag->released; });
  }
  flag->pool->Abandon(flag);
}

void FlagPool::Abandon(Flag* flag) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(flag);
}

}  // namespace hetccl::device
