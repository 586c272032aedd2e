#include "xla_ffi/device/twin/scheduler.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "xla_ffi/device/twin/codes.h"

namespace hetccl::twin {
namespace {

thread_local bool in_host_function = false;

void Name(const std::string& name) {
  ::pthread_setname_np(::pthread_self(), name.substr(0, 15).c_str());
}

}  // namespace

std::vector<Operation> Only(Operation operation) {
  std::vector<Operation> operations;
  operations.push_back(std::move(operation));
  return operations;
}

bool InHostFunction() { return in_host_function; }

struct Scheduler::Stream {
  Handle handle = 0;
  int device = 0;
  Queue* queue = nullptr;
  std::deque<Operation> operations;  // the first may be running
  uint64_t submitted = 0;
  uint64_t finished = 0;
  bool destroyed = false;
  bool ended = false;
  std::condition_variable wake;
  Lane lane;
  std::thread thread;
};

Scheduler::Scheduler(Settings* settings) : settings_(*settings) {}

Scheduler::~Scheduler() { Reset(); }

Scheduler::Stream* Scheduler::Make(int device) {
  std::vector<Queue>& queues = queues_[device];
  if (queues.empty()) {
    queues.resize(static_cast<size_t>(std::max<int64_t>(1, settings_.Number("queues"))));
  }
  auto* stream = new Stream;
  stream->device = device;
  stream->queue = &queues[next_queue_[device]++ % queues.size()];
  stream->handle = next_handle_ += 0x10;
  stream->thread = std::thread([this, stream] { RunStream(stream); });
  return stream;
}

int Scheduler::CreateStream(int device, Handle* handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  JoinEnded();
  std::unique_ptr<Stream> stream(Make(device));
  *handle = stream->handle;
  streams_[*handle] = std::move(stream);
  return kSuccess;
}

void Scheduler::JoinEnded() {
  for (auto& stream : destroyed_) {
    if (stream->ended) stream->thread.join();
  }
  destroyed_.erase(std::remove_if(destroyed_.begin(), destroyed_.end(),
                                  [](const auto& stream) { return !stream->thread.joinable(); }),
                   destroyed_.end());
}

int Scheduler::DestroyStream(Handle handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = streams_.find(handle);
  if (found == streams_.end()) return kInvalidHandle;
  found->second->destroyed = true;
  found->second->wake.notify_all();
  destroyed_.push_back(std::move(found->second));
  streams_.erase(found);
  return kSuccess;
}

Scheduler::Stream* Scheduler::Find(Handle handle, int device) {
  if (handle == 0) {
    std::unique_ptr<Stream>& stream = default_streams_[device];
    if (stream == nullptr) stream.reset(Make(device));
    return stream.get();
  }
  const auto found = streams_.find(handle);
  return found == streams_.end() ? nullptr : found->second.get();
}

int Scheduler::DeviceOf(Handle handle, int* device) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (handle == 0) return kSuccess;
  Stream* stream = Find(handle, *device);
  if (stream == nullptr) return kInvalidHandle;
  *device = stream->device;
  return kSuccess;
}

int Scheduler::Enqueue(Handle handle, int device, std::vector<Operation> operations, bool wait) {
  std::unique_lock<std::mutex> lock(mutex_);
  Stream* stream = Find(handle, device);
  if (stream == nullptr) return kInvalidHandle;
  for (Operation& operation : operations) {
    if (operation.work != nullptr) {
      operation.work->lost = [this, on = stream->device] { return Lost(on); };
      Publish(operation.work.get());
    }
    stream->operations.push_back(std::move(operation));
    stream->queue->order.push_back(stream);
    ++stream->submitted;
  }
  stream->wake.notify_all();
  if (!wait) return kSuccess;
  const uint64_t until = stream->submitted;
  const int on = stream->device;
  progress_.wait(lock, [&] { return Lost(on) || stream->finished >= until; });
  Observe(stream);
  return broken(on);
}

int Scheduler::QueryStream(Handle handle, int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  Stream* stream = Find(handle, device);
  if (stream == nullptr) return kInvalidHandle;
  if (int code = broken(stream->device)) return code;
  if (stream->finished != stream->submitted) return kNotReady;
  Observe(stream);
  return kSuccess;
}

int Scheduler::SynchronizeStream(Handle handle, int device) {
  return Enqueue(handle, device, {}, true);
}

int Scheduler::SynchronizeDevice(int device) {
  std::unique_lock<std::mutex> lock(mutex_);
  std::vector<std::pair<Handle, uint64_t>> targets;
  std::vector<const void*> tokens;
  const auto add = [&](const std::unique_ptr<Stream>& stream) {
    if (stream->device != device) return;
    targets.emplace_back(stream->handle, stream->submitted);
    tokens.push_back(stream.get());
  };
  for (const auto& [handle, stream] : streams_) add(stream);
  for (const auto& [on, stream] : default_streams_) add(stream);
  for (const auto& stream : destroyed_) add(stream);
  // A stream that has been joined meanwhile has run everything.
  const auto behind = [&](const std::unique_ptr<Stream>& stream) {
    return std::any_of(targets.begin(), targets.end(), [&](const auto& target) {
      return target.first == stream->handle && stream->finished < target.second;
    });
  };
  progress_.wait(lock, [&] {
    if (Lost(device)) return true;
    for (const auto& [handle, stream] : streams_) {
      if (behind(stream)) return false;
    }
    for (const auto& [on, stream] : default_streams_) {
      if (behind(stream)) return false;
    }
    return std::none_of(destroyed_.begin(), destroyed_.end(), behind);
  });
  for (const void* token : tokens) Observe(token);
  return broken(device);
}

void Scheduler::RunStream(Stream* stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  Name("twin-stream-" + std::to_string(stream->handle >> 4));
  for (;;) {
    stream->wake.wait(lock, [&] {
      if (stopping_.load()) return true;
      if (stream->operations.empty()) return stream->destroyed;
      return stream->queue->order.front() == stream;
    });
    if (stopping_.load() || stream->operations.empty()) break;
    Operation& operation = stream->operations.front();  // later ones go behind it
    Execute(lock, stream, &operation);
    stream->lane.Do(nullptr, nullptr, false, stream, operation.completed.get());
    if (operation.completed != nullptr) operation.completed->done = true;
    stream->operations.pop_front();
    ++stream->finished;
    stream->queue->order.pop_front();
    if (!stream->queue->order.empty()) stream->queue->order.front()->wake.notify_all();
    progress_.notify_all();
  }
  stream->ended = true;
}

void Scheduler::Execute(std::unique_lock<std::mutex>& lock, Stream* stream, Operation* operation) {
  const int device = stream->device;
  bool run = broken(device) == 0;
  lock.unlock();
  if (const auto delay = settings_.DelayOf(operation->call); run && delay.count() > 0) {
    std::this_thread::sleep_for(delay);
  }
  if (const int code = run ? settings_.EnterRun(operation->call) : 0) {
    Break(device, code);
    run = false;
  }
  if (Work* const work = operation->work.release()) {
    stream->lane.Do(work, work, run, nullptr, nullptr);
  }
  lock.lock();
  if (run && operation->host_function) RunOnHostThread(lock, stream, operation->host_function);
}

void Scheduler::RunOnHostThread(std::unique_lock<std::mutex>& lock, Stream* stream,
                                const std::function<void()>& function) {
  if (!host_thread_.joinable()) host_thread_ = std::thread([this] { HostThread(); });
  // Shared: a stream of a lost device leaves while its function may still be under way.
  const int device = stream->device;
  const auto done = std::make_shared<Recording>();
  stream->lane.Do(nullptr, nullptr, false, done.get(), nullptr);
  host_functions_.push_back([this, function, done] {
    Observe(done.get());
    function();
    Publish(done.get());
    std::lock_guard<std::mutex> relock(mutex_);
    done->done = true;
    progress_.notify_all();
  });
  host_wake_.notify_all();
  progress_.wait(lock, [&] { return Lost(device) || done->done; });
  stream->lane.Do(done.get(), nullptr, false, nullptr, nullptr);
}

void Scheduler::HostThread() {
  Name("twin-host-func");
  in_host_function = true;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    host_wake_.wait(lock, [this] { return stopping_.load() || !host_functions_.empty(); });
    if (stopping_.load()) return;
    const std::function<void()> function = std::move(host_functions_.front());
    host_functions_.pop_front();
    lock.unlock();
    function();
    lock.lock();
  }
}

int Scheduler::CreateEvent(int device, Handle* event) {
  std::lock_guard<std::mutex> lock(mutex_);
  *event = next_handle_ += 0x10;
  events_[*event] = EventState{device, nullptr};
  return kSuccess;
}

int Scheduler::RecordEvent(const std::string& call, Handle event, Handle stream, int device) {
  Operation operation;
  operation.call = call;
  operation.completed = std::make_shared<Recording>();
  if (int code = DeviceOf(stream, &device)) return code;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = events_.find(event);
    // An event is recorded on streams of its own device only.
    if (found == events_.end() || found->second.device != device) return kInvalidHandle;
    found->second.last = operation.completed;
  }
  return Enqueue(stream, device, Only(std::move(operation)), false);
}

int Scheduler::QueryEvent(Handle event) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end()) return kInvalidHandle;
  if (int code = broken(found->second.device)) return code;
  if (found->second.last == nullptr) return kSuccess;
  if (!found->second.last->done) return kNotReady;
  Observe(found->second.last.get());
  return kSuccess;
}

void Scheduler::Break(int device, int code) {
  broken_[static_cast<size_t>(device)].store(code);
  std::lock_guard<std::mutex> lock(mutex_);
  progress_.notify_all();
}

int64_t Scheduler::streams() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(streams_.size());
}

int64_t Scheduler::events() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(events_.size());
}

void Scheduler::Reset() {
  std::vector<std::unique_ptr<Stream>> ending;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_.store(true);
    for (auto& [handle, stream] : streams_) ending.push_back(std::move(stream));
    for (auto& [device, stream] : default_streams_) ending.push_back(std::move(stream));
    for (auto& stream : destroyed_) ending.push_back(std::move(stream));
    streams_.clear();
    default_streams_.clear();
    destroyed_.clear();
    for (const auto& stream : ending) stream->wake.notify_all();
    host_wake_.notify_all();
    progress_.notify_all();
  }
  for (const auto& stream : ending) stream->thread.join();
  if (host_thread_.joinable()) host_thread_.join();
  std::lock_guard<std::mutex> lock(mutex_);
  events_.clear();
  host_functions_.clear();
  queues_.clear();
  next_queue_.clear();
  for (auto& code : broken_) code.store(0);
  stopping_.store(false);
}

}  // namespace hetccl::twin
