#include "xla_ffi/device/twin/twin.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "xla_ffi/device/twin/export.h"

namespace hetccl::twin {
namespace {

Operation Running(const char* call, std::function<void()> run) {
  Operation operation;
  operation.call = call;
  operation.work = std::make_unique<Work>();
  operation.work->run = std::move(run);
  return operation;
}

// Host memory of a copy: null if it is neither wholly known to the driver nor wholly unknown.
char* HostSide(const Twin& twin, const void* address, size_t bytes, bool* pageable) {
  const auto number = reinterpret_cast<uintptr_t>(address);
  char* known = twin.memory.Translate(number, bytes, true);
  *pageable = known == nullptr;
  if (known != nullptr || twin.memory.Touches(number, bytes)) return known;
  return static_cast<char*>(const_cast<void*>(address));
}

bool Holds(bool cyclic, unsigned compare, const char* at, const ValueOperation& operation) {
  const uint32_t now =
      __atomic_load_n(reinterpret_cast<const uint32_t*>(at), __ATOMIC_ACQUIRE) & operation.mask;
  if (compare == 1) return now == operation.value;
  return cyclic ? static_cast<int32_t>(now - operation.value) >= 0 : now >= operation.value;
}

}  // namespace

Twin::Twin(const Personality& personality)
    : is(personality),
      settings({{"devices", 2},
                {"queues", 8},
                {"driver_version", personality.version},
                {"same_addresses", 0},
                {"memory_waits", 0},
                {"jitter_us", 0}}),
      scheduler(&settings) {}

Twin& TheTwin() {
  static auto* const twin = new Twin(ThisPersonality());
  return *twin;
}

std::optional<int> AttributeOf(const Twin& twin, int attribute) {
  if (const auto set = twin.settings.Attribute(attribute)) return set;
  if (attribute == twin.is.same_addresses) {
    return static_cast<int>(twin.settings.Number("same_addresses"));
  }
  const auto known = twin.is.attributes.find(attribute);
  return known == twin.is.attributes.end() ? std::nullopt : std::optional<int>(known->second);
}

CallingThread& ThisThread() {
  thread_local CallingThread thread;
  return thread;
}

int CurrentDevice(const Twin& twin) {
  const CallingThread& thread = ThisThread();
  if (!twin.is.explicit_contexts) return thread.device;
  return thread.contexts.empty() ? -1 : thread.contexts.back();
}

int Admit(Twin& twin, const char* call, Needs needs) {
  const int code = twin.settings.Enter(call);
  if (InHostFunction()) return kNotPermitted;
  const int device = CurrentDevice(twin);
  if (code != 0) {
    if (IsSticky(code) && device >= 0) twin.scheduler.Break(device, code);
    return code;
  }
  if (needs == Needs::kNothing) return kSuccess;
  if (!twin.initialised.load() && twin.is.explicit_contexts) return kNotInitialized;
  if (twin.devices() == 0) return kNoDevice;
  if (needs == Needs::kInitialised) return kSuccess;
  if (device < 0) return kInvalidContext;
  return twin.scheduler.broken(device);
}

void PassContext(Twin& twin) {
  const std::lock_guard<std::mutex> pass(twin.contexts[static_cast<size_t>(CurrentDevice(twin))]);
}

int WaitInContext(Twin& twin, int device) {
  const std::lock_guard<std::mutex> lock(twin.contexts[static_cast<size_t>(device)]);
  return twin.scheduler.SynchronizeDevice(device);
}

int WaitForMemory(Twin& twin) {
  if (twin.settings.Number("memory_waits") == 0) return kSuccess;
  return WaitInContext(twin, CurrentDevice(twin));
}

int Copy(Twin& twin, const char* call, void* to, const void* from, size_t bytes, Handle stream,
         Direction direction) {
  if (bytes == 0) return kSuccess;
  bool pageable_to = false;
  bool pageable_from = false;
  char* into = direction == Direction::kToHost
                   ? HostSide(twin, to, bytes, &pageable_to)
                   : twin.memory.Translate(reinterpret_cast<uintptr_t>(to), bytes, true);
  const char* out = direction == Direction::kToDevice
                        ? HostSide(twin, from, bytes, &pageable_from)
                        : twin.memory.Translate(reinterpret_cast<uintptr_t>(from), bytes, true);
  if (into == nullptr || out == nullptr) return kInvalidValue;
  return twin.scheduler.Enqueue(
      stream, CurrentDevice(twin),
      Only(Running(call, [into, out, bytes] { std::memmove(into, out, bytes); })),
      pageable_to || pageable_from);
}

int Fill(Twin& twin, const char* call, void* to, uint32_t pattern, size_t size, size_t count,
         Handle stream) {
  if (count == 0) return kSuccess;
  const auto address = reinterpret_cast<uintptr_t>(to);
  char* into = twin.memory.Translate(address, size * count, true);
  if (into == nullptr || address % size != 0) return kInvalidValue;
  const auto fill = [=] {
    for (size_t i = 0; i < count; ++i) std::memcpy(into + i * size, &pattern, size);
  };
  return twin.scheduler.Enqueue(stream, CurrentDevice(twin), Only(Running(call, fill)), false);
}

int MemoryOperations(Twin& twin, const char* call, Handle stream,
                     const std::vector<ValueOperation>& operations) {
  constexpr unsigned kFlush = 1u << 30;  // CU_STREAM_WAIT_VALUE_FLUSH
  constexpr int kCanFlush = 98;          // CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
  if (twin.is.can_wait != 0 && AttributeOf(twin, twin.is.can_wait).value_or(0) == 0) {
    return kNotSupported;
  }
  std::vector<Operation> queued;
  for (const ValueOperation& operation : operations) {
    const unsigned compare = operation.flags & ~kFlush;
    char* at = twin.memory.Translate(operation.address, sizeof(uint32_t), false);
    if (at == nullptr || operation.address % sizeof(uint32_t) != 0) return kInvalidValue;
    if (operation.wait && twin.is.waits_on_signals_only &&
        twin.memory.Find(operation.address)->kind != Kind::kSignal) {
      return kInvalidValue;
    }
    if ((operation.flags & kFlush) != 0 && AttributeOf(twin, kCanFlush).value_or(0) == 0) {
      return kNotSupported;
    }
    if (compare > 1) return kInvalidValue;  // other comparisons: the product needs none
    Operation next;
    next.call = call;
    next.work = std::make_unique<Work>();
    if (operation.wait) {
      next.work->ready = [cyclic = twin.is.cuda, compare, at, operation] {
        return Holds(cyclic, compare, at, operation);
      };
    } else {
      next.work->run = [at, value = operation.value] {
        __atomic_store_n(reinterpret_cast<uint32_t*>(at), value, __ATOMIC_RELEASE);
      };
    }
    queued.push_back(std::move(next));
  }
  return twin.scheduler.Enqueue(stream, CurrentDevice(twin), std::move(queued), false);
}

int HostFunction(Twin& twin, const char* call, Handle stream, void (*function)(void*), void* data) {
  if (function == nullptr) return kInvalidValue;
  Operation operation;
  operation.call = call;
  operation.host_function = [function, data] { function(data); };
  return twin.scheduler.Enqueue(stream, CurrentDevice(twin), Only(std::move(operation)), false);
}

int Free(Twin& twin, void* address, bool host_memory) {
  if (address == nullptr) return host_memory ? kInvalidValue : kSuccess;
  if (int code = WaitForMemory(twin)) return code;
  if (int code = twin.scheduler.SynchronizeDevice(CurrentDevice(twin))) return code;
  return twin.memory.Free(reinterpret_cast<uintptr_t>(address), host_memory);
}

int Register(Twin& twin, void* base, size_t bytes) {
  if (int code = WaitForMemory(twin)) return code;
  const bool alias = twin.settings.Number("same_addresses") == 0;
  return twin.memory.Register(base, bytes, alias);
}

int Unregister(Twin& twin, void* base) {
  if (int code = WaitForMemory(twin)) return code;
  if (int code = twin.scheduler.SynchronizeDevice(CurrentDevice(twin))) return code;
  return twin.memory.Unregister(base);
}

int DeviceAddress(Twin& twin, void* host, void** device) {
  const auto address = reinterpret_cast<uintptr_t>(host);
  const auto range = twin.memory.Find(address);
  if (device == nullptr || !range || range->kind == Kind::kDevice) return kInvalidValue;
  const uintptr_t offset = address - reinterpret_cast<uintptr_t>(range->base);
  *device = reinterpret_cast<void*>(range->device_base + offset);
  return kSuccess;
}

int Export(Twin& twin, void* handle, uintptr_t address, size_t bytes, int type) {
  constexpr int kDescriptor = 1;
  if (AttributeOf(twin, twin.is.dma_buf).value_or(0) == 0) return kNotSupported;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto range = twin.memory.Find(address);
  if (handle == nullptr || type != kDescriptor || !range || range->kind != Kind::kDevice ||
      twin.memory.Translate(address, bytes, false) == nullptr || address % page != 0 ||
      bytes % page != 0) {
    return kInvalidValue;
  }
  // A descriptor begins where its range does.
  if (address != range->device_base) return kNotSupported;
  const int copy = Memory::Export(*range, bytes);
  if (copy < 0) return kOutOfMemory;
  *static_cast<int*>(handle) = copy;
  return kSuccess;
}

int Name(Twin& twin, char* text, int length, int device) {
  if (text == nullptr || length < 1 || device < 0 || device >= twin.devices()) {
    return kInvalidValue;
  }
  std::snprintf(text, static_cast<size_t>(length), "test twin of a %s device",
                twin.is.cuda ? "CUDA" : "HIP");
  return kSuccess;
}

int PciBusId(Twin& twin, char* text, int length, int device) {
  if (text == nullptr || length < 13 || device < 0 || device >= twin.devices()) {
    return kInvalidValue;
  }
  std::snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", 0x10 + device);
  return kSuccess;
}

}  // namespace hetccl::twin
