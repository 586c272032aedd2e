#include "xla_ffi/device/stream/stream_space.h"

#include <chrono>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "xla_ffi/device/stream/stream_copier.h"

namespace hetccl::device {
namespace {

// All there will be: drivers may wait for the device when they allocate, which handlers must not.
// A mark for each exchange between its start and its end, a flag for each stream that waits for
// one; where flags run out, done waits on the host. 128 KB and 16 KB (HIP: a page for each flag).
constexpr int kMarks = 2048;
constexpr int kFlags = 256;
// Flags that are left to Separate: with host functions they come back a little later.
constexpr size_t kSpareFlags = 4;

// The device that MakeCurrent last made current on this thread; used on threads of ours only.
thread_local const Gpu* entered = nullptr;

Status Choose(const std::string& wanted, const Gpu& gpu, StreamSync* sync) {
  const Capabilities& can = gpu.capabilities();
  if (wanted != "auto" && wanted != "memops" && wanted != "hostfunc") {
    return InternalError("HETCCL_STREAM_SYNC is \"" + wanted +
                         "\"; it must be auto, memops or hostfunc");
  }
  *sync = can.stream_memory_operations && wanted != "hostfunc" ? StreamSync::kMemops
                                                               : StreamSync::kHostFunc;
  if (wanted == "memops" && *sync != StreamSync::kMemops) {
    return InternalError("HETCCL_STREAM_SYNC=memops, but " + gpu.name() + " with driver " +
                         std::to_string(gpu.driver().version()) +
                         " has no stream memory operations; use auto or hostfunc");
  }
  if (*sync == StreamSync::kHostFunc && !can.host_functions) {
    return InternalError(gpu.name() + " with driver " + std::to_string(gpu.driver().version()) +
                         " has neither stream memory operations nor host functions (missing: " +
                         can.missing + "); install a newer driver");
  }
  return Status();
}

struct Registry {
  std::mutex mutex;
  std::map<std::tuple<Vendor, int, StreamSync, std::string>, std::shared_ptr<StreamSpace>> spaces;
};

Registry& Spaces() {
  static auto* registry = new Registry();
  return *registry;
}

Stream ToStream(Queue queue) { return static_cast<Stream>(queue); }

}  // namespace

class PinnedMemory final : public SlotMemory {
 public:
  PinnedMemory(std::shared_ptr<StreamSpace> space, void* data, size_t bytes, bool own)
      : space_(std::move(space)), data_(data), bytes_(bytes), own_(own) {}
  ~PinnedMemory() override {
    const Gpu& gpu = space_->gpu_;
    space_->GiveBack([&] { return own_ ? gpu.MemFreeHost(data_) : gpu.MemHostUnregister(data_); });
    Allocations& count = space_->allocations_;
    (own_ ? count.pinned_bytes : count.registered_bytes).fetch_sub(static_cast<int64_t>(bytes_));
  }
  std::byte* data() const override { return static_cast<std::byte*>(data_); }

 private:
  const std::shared_ptr<StreamSpace> space_;
  void* const data_;
  const size_t bytes_;
  const bool own_;
};

// Gives its mark back when the exchange is over.
class StreamGate final : public Gate {
 public:
  StreamGate(std::shared_ptr<StreamSpace> space, Mark* mark)
      : space_(std::move(space)), mark_(mark) {}
  ~StreamGate() override { space_->marks_.Release(mark_); }
  Status Poll(bool* open) override {
    if (space_->marks_.asks_driver()) {
      if (Status status = space_->Enter(); !status.ok()) return status;
    }
    return space_->marks_.Reached(*mark_, open);
  }
  bool asks_driver() const override { return space_->marks_.asks_driver(); }

 private:
  const std::shared_ptr<StreamSpace> space_;
  Mark* const mark_;
};

class StreamHold final : public Hold {
 public:
  StreamHold(std::shared_ptr<StreamSpace> space, Flag* flag)
      : space_(std::move(space)), flag_(flag) {}
  ~StreamHold() override { Release(); }
  void Release() override {
    Flag* flag = flag_.exchange(nullptr);
    if (flag == nullptr) return;
    space_->flags_.Release(flag);
    space_->exclusion_.HoldEnds();
  }

 private:
  const std::shared_ptr<StreamSpace> space_;
  std::atomic<Flag*> flag_;
};

StreamSpace::StreamSpace(const Gpu& gpu, StreamSync sync)
    : gpu_(gpu),
      sync_(sync),
      marks_(gpu, sync == StreamSync::kMemops ? MarkKind::kWord : MarkKind::kEvent, &allocations_),
      copy_marks_(gpu, MarkKind::kEvent, &allocations_),
      flags_(gpu, sync, &allocations_),
      hold_bound_(Duration(std::chrono::minutes(12)).count()) {}

Status StreamSpace::Open(const StreamSpaceOptions& options, std::shared_ptr<StreamSpace>* space) {
  const Driver* driver = nullptr;
  if (Status status = Driver::Get(options.vendor, options.library, &driver); !status.ok()) {
    return status;
  }
  const Gpu* gpu = nullptr;
  if (Status status = driver->Open(options.ordinal, &gpu); !status.ok()) return status;
  StreamSync sync = StreamSync::kMemops;
  if (Status status = Choose(options.sync, *gpu, &sync); !status.ok()) return status;
  Registry& registry = Spaces();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto& slot = registry.spaces[{options.vendor, options.ordinal, sync, options.library}];
  if (slot == nullptr) {
    std::shared_ptr<StreamSpace> made(new StreamSpace(*gpu, sync));
    if (Status status = made->Initialise(); !status.ok()) return status;
    slot = std::move(made);
  }
  *space = slot;
  return Status();
}

Status StreamSpace::Initialise() {
  const ScopedCurrent current(gpu_);
  if (!current.status().ok()) return current.status();
  for (std::atomic<Stream>* place : {&out_, &in_}) {
    allocations_.calls.fetch_add(1);
    Stream stream = nullptr;
    if (Status status = gpu_.StreamCreate(/*high_priority=*/true, &stream); !status.ok()) {
      return status;
    }
    place->store(stream);
  }
  allocations_.calls.fetch_add(1);
  if (Status status = gpu_.StreamCreate(/*high_priority=*/true, &clock_); !status.ok())
    return status;
  if (Status status = marks_.Reserve(kMarks); !status.ok()) return status;
  if (Status status = flags_.Reserve(kFlags); !status.ok()) return status;
  return WarmUp();
}

Status StreamSpace::WarmUp() {
  constexpr size_t kBytes = 512;
  void* device = nullptr;
  void* host = nullptr;
  if (Status status = gpu_.MemAlloc(kBytes, &device); !status.ok()) return status;
  Status status = gpu_.MemHostAlloc(kBytes, &host);
  auto* bytes = static_cast<std::byte*>(device);
  if (status.ok()) status = gpu_.MemsetD8Async(bytes, 0, kBytes, in_);
  if (status.ok()) status = gpu_.MemsetD32Async(bytes, 0, kBytes / 4, in_);
  if (status.ok()) status = gpu_.MemcpyDtoDAsync(bytes + kBytes / 2, bytes, kBytes / 2, in_);
  if (status.ok()) status = gpu_.MemcpyHtoDAsync(bytes, host, kBytes, in_);
  if (status.ok()) status = gpu_.StreamSynchronize(in_);
  if (status.ok()) status = gpu_.MemcpyDtoHAsync(host, bytes, kBytes, out_);
  if (status.ok()) status = gpu_.StreamSynchronize(out_);
  if (host != nullptr) (void)gpu_.MemFreeHost(host).ok();
  (void)gpu_.MemFree(device).ok();
  return status;
}

Status StreamSpace::Enter() const {
  if (entered == &gpu_) return Status();
  Status status = gpu_.MakeCurrent();
  if (status.ok()) entered = &gpu_;
  return status;
}

Status StreamSpace::MakeCopier(Direction direction, size_t, std::unique_ptr<Copier>* copier) {
  auto made = std::make_unique<StreamCopier>(shared_from_this(), direction, SlotsOn::kHost);
  if (Status status = made->Initialise(); !status.ok()) return status;
  *copier = std::move(made);
  return Status();
}

Status StreamSpace::Acquire(const char* purpose, const std::function<Status()>& call) {
  const Section section(&exclusion_);
  if (!exclusion_.AwaitNoHold(Duration(hold_bound_.load()))) {
    return Status(ErrorKind::kTimeout, std::string(purpose) + " has to wait until no stream of " +
                                           gpu_.name() +
                                           " is held by an exchange, and one still is");
  }
  const ScopedCurrent current(gpu_);
  if (!current.status().ok()) return current.status();
  allocations_.calls.fetch_add(1);
  return call();
}

void StreamSpace::GiveBack(const std::function<Status()>& call) {
  const Section section(&exclusion_);
  (void)exclusion_.AwaitNoHold(std::chrono::seconds(10));
  const ScopedCurrent current(gpu_);
  (void)call().ok();
}

Status StreamSpace::Register(void* data, size_t bytes, std::unique_ptr<SlotMemory>* memory) {
  Status status = Acquire("registering memory", [&] { return gpu_.MemHostRegister(data, bytes); });
  if (!status.ok()) return status;
  allocations_.registered_bytes.fetch_add(static_cast<int64_t>(bytes));
  *memory = std::make_unique<PinnedMemory>(shared_from_this(), data, bytes, /*own=*/false);
  return Status();
}

Status StreamSpace::Allocate(size_t bytes, std::unique_ptr<SlotMemory>* memory) {
  void* data = nullptr;
  Status status =
      Acquire("allocating pinned memory", [&] { return gpu_.MemHostAlloc(bytes, &data); });
  if (!status.ok()) return status;
  allocations_.pinned_bytes.fetch_add(static_cast<int64_t>(bytes));
  *memory = std::make_unique<PinnedMemory>(shared_from_this(), data, bytes, /*own=*/true);
  return Status();
}

Status StreamSpace::Zero(std::byte* data, size_t bytes, Queue queue) {
  return Fill({{data, bytes, Pattern{{}, 0}}}, queue);
}

Status StreamSpace::MarkStart(Queue queue, std::shared_ptr<Gate>* gate) {
  const ScopedCurrent current(gpu_);
  if (!current.status().ok()) return current.status();
  Mark* mark = nullptr;
  if (Status status = marks_.Acquire(&mark); !status.ok()) return status;
  if (Status status = marks_.Record(mark, ToStream(queue)); !status.ok()) {
    // Not given back: whether the stream will write it is not known.
    return status;
  }
  *gate = std::make_shared<StreamGate>(shared_from_this(), mark);
  return Status();
}

Status StreamSpace::HoldQueue(Queue queue, std::shared_ptr<Hold>* hold) {
  const ScopedCurrent current(gpu_);
  if (!current.status().ok()) return current.status();
  hold->reset();
  if (!exclusion_.HoldBegins()) return Status();
  Flag* flag = flags_.Acquire(kSpareFlags);
  Status status;
  if (flag != nullptr) {
    status = Separate(ToStream(queue));
    if (status.ok()) status = flags_.Hold(flag, ToStream(queue));
    if (status.ok()) {
      *hold = std::make_shared<StreamHold>(shared_from_this(), flag);
      return Status();
    }
    flags_.Abandon(flag);
  }
  exclusion_.HoldEnds();
  return status;
}

bool StreamSpace::Lost() {
  if (!Enter().ok()) return true;
  bool idle = false;
  const std::shared_lock<std::shared_mutex> lock(copy_streams_mutex_);
  return !gpu_.StreamQuery(copy_stream(Direction::kIn), &idle).ok();
}

Status StreamSpace::Copy(std::byte* to, const std::byte* from, size_t bytes, Queue queue) {
  if (to == from || bytes == 0) return Status();
  const ScopedCurrent current(gpu_);
  if (!current.status().ok()) return current.status();
  return gpu_.MemcpyDtoDAsync(to, from, bytes, ToStream(queue));
}

bool StreamSpace::orders_remote_writes() const {
  const Capabilities& can = gpu_.capabilities();
  return can.gpu_direct_rdma && can.writes_ordering < WritesOrdering::kOwner && can.host_flush;
}

Status StreamSpace::OrderRemoteWrites() {
  if (!orders_remote_writes()) return Status();
  if (Status status = Enter(); !status.ok()) return status;
  return gpu_.FlushRemoteWrites();
}

SpaceStats StreamSpace::Stats() const {
  return {{"streams", 3},
          {"events", allocations_.marks.load()},
          {"flags", allocations_.flags.load()},
          {"pinned_bytes", allocations_.pinned_bytes.load()},
          {"registered_bytes", allocations_.registered_bytes.load()},
          {"allocations", allocations_.calls.load()},
          {"memops", sync_ == StreamSync::kMemops ? 1 : 0}};
}

}  // namespace hetccl::device
