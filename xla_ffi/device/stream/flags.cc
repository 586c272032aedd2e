#include "xla_ffi/device/stream/flags.h"

#include <string>
#include <utility>

namespace hetccl::device {
namespace {

// Each word has its own cache line, as one side writes it while the other one polls.
constexpr size_t kWordBytes = 64;
// What a driver may take for one signal.
constexpr int64_t kPageBytes = 4096;

// Words in one piece of pinned memory, all zero.
Status MakeWords(const Gpu& gpu, int count, Allocations* allocations, std::vector<Signal>* words) {
  const size_t bytes = static_cast<size_t>(count) * kWordBytes;
  allocations->calls.fetch_add(1);
  void* host = nullptr;
  void* device = nullptr;
  if (Status status = gpu.MemHostAlloc(bytes, &host); !status.ok()) return status;
  allocations->pinned_bytes.fetch_add(static_cast<int64_t>(bytes));
  if (Status status = gpu.MemHostGetDevicePointer(host, &device); !status.ok()) return status;
  for (size_t offset = 0; offset < bytes; offset += kWordBytes) {
    auto* word = reinterpret_cast<uint32_t*>(static_cast<char*>(host) + offset);
    __atomic_store_n(word, 0, __ATOMIC_RELEASE);
    words->push_back({word, static_cast<char*>(device) + offset});
  }
  return Status();
}

}  // namespace

Status MarkPool::Make(int count, std::vector<std::unique_ptr<Mark>>* marks) {
  marks->resize(static_cast<size_t>(count));
  for (auto& mark : *marks) mark = std::make_unique<Mark>();
  if (kind_ == MarkKind::kEvent) {
    for (auto& mark : *marks) {
      allocations_.calls.fetch_add(1);
      if (Status status = gpu_.EventCreate(&mark->event); !status.ok()) return status;
    }
  } else {
    std::vector<Signal> words;
    if (Status status = MakeWords(gpu_, count, &allocations_, &words); !status.ok()) return status;
    for (size_t i = 0; i < marks->size(); ++i) {
      (*marks)[i]->host = words[i].host;
      (*marks)[i]->device = words[i].device;
    }
  }
  allocations_.marks.fetch_add(count);
  return Status();
}

Status MarkPool::Reserve(int count) {
  std::vector<std::unique_ptr<Mark>> made;
  if (Status status = Make(count, &made); !status.ok()) return status;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& mark : made) {
    free_.push_back(mark.get());
    all_.push_back(std::move(mark));
  }
  return Status();
}

Status MarkPool::TakeFree(Mark** mark) {
  // A mark whose exchange was given up may still stand in a stream.
  for (size_t looks = free_.size(); looks > 0; --looks) {
    *mark = free_.front();
    free_.pop_front();
    bool reached = false;
    Status status = Reached(**mark, &reached);
    if (reached) return Status();
    free_.push_back(*mark);
    if (!status.ok()) return status;
  }
  *mark = nullptr;
  return Status();
}

Status MarkPool::Acquire(Mark** mark) {
  std::lock_guard<std::mutex> lock(mutex_);
  Status status = TakeFree(mark);
  if (!status.ok() || *mark != nullptr) return status;
  return InternalError(std::to_string(all_.size()) + " exchanges are under way on " + gpu_.name() +
                       ", which is all that there can be: the program starts too many before the "
                       "first of them is needed; let more of them share a bucket "
                       "(HETCCL_BUCKET_MB)");
}

Status MarkPool::AcquireOrMake(Mark** mark) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Status status = TakeFree(mark);
    if (!status.ok() || *mark != nullptr) return status;
  }
  // Handed out at once: in the pool somebody else could take it.
  std::vector<std::unique_ptr<Mark>> made;
  if (Status status = Make(1, &made); !status.ok()) return status;
  std::lock_guard<std::mutex> lock(mutex_);
  *mark = made.front().get();
  all_.push_back(std::move(made.front()));
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

Status FlagPool::MakeSignals(int count, std::vector<Signal>* signals) {
  // CUDA's streams wait for any pinned memory; HIP's for signals, each an allocation of its own.
  if (gpu_.vendor() == Vendor::kCuda) return MakeWords(gpu_, count, &allocations_, signals);
  for (int i = 0; i < count; ++i) {
    Signal signal;
    allocations_.calls.fetch_add(1);
    if (Status status = gpu_.SignalAlloc(&signal); !status.ok()) return status;
    allocations_.pinned_bytes.fetch_add(kPageBytes);
    signals->push_back(signal);
  }
  return Status();
}

Status FlagPool::Reserve(int count) {
  std::vector<Signal> signals(static_cast<size_t>(sync_ == StreamSync::kMemops ? 0 : count));
  if (sync_ == StreamSync::kMemops) {
    if (Status status = MakeSignals(count, &signals); !status.ok()) return status;
  }
  allocations_.flags.fetch_add(count);
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Signal& signal : signals) {
    auto flag = std::make_unique<Flag>();
    flag->pool = this;
    flag->signal = signal;
    flag->value = first_;
    if (signal.host != nullptr) __atomic_store_n(signal.host, first_, __ATOMIC_RELEASE);
    free_.push_back(flag.get());
    all_.push_back(std::move(flag));
  }
  return Status();
}

Flag* FlagPool::Acquire(size_t spare) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (free_.size() <= spare) return nullptr;
  Flag* flag = free_.front();
  free_.pop_front();
  return flag;
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
  if (!UsedUp(*flag)) free_.push_back(flag);
}

}  // namespace hetccl::device
