// Buffers in a GPU's memory, copied by its DMA engines.
#ifndef XLA_FFI_DEVICE_STREAM_STREAM_SPACE_H_
#define XLA_FFI_DEVICE_STREAM_STREAM_SPACE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

#include "xla_ffi/common/clock.h"
#include "xla_ffi/common/status.h"
#include "xla_ffi/device/driver/gpu.h"
#include "xla_ffi/device/fill.h"
#include "xla_ffi/device/space.h"
#include "xla_ffi/device/stream/exclusion.h"
#include "xla_ffi/device/stream/flags.h"

namespace hetccl::device {

struct StreamSpaceOptions {
  Vendor vendor = Vendor::kCuda;
  int ordinal = 0;
  std::string sync =
      "auto";           // "memops", "hostfunc"; auto: memory operations where they are to be had
  std::string library;  // the driver's; empty: the vendor's usual names
};

// Holds back what is queued behind it in a stream until it is released. Thread-safe.
class Hold {
 public:
  virtual ~Hold() = default;
  // Lets the stream go on; the first call counts. Does not wait and calls no driver function. The
  // destructor releases too: no wait is ever left in a stream.
  virtual void Release() = 0;
};

// A filled range, for Poison.
struct FillRange {
  std::byte* data;
  size_t bytes;
  Pattern pattern;
};

// One device. Thread-safe. Owns one stream for all copies out of the device and one for all copies
// into it, whatever the number of channels. Nothing that waits for a peer is ever queued in them:
// copies are queued when their slot is known to be free, or filled, and their exchange's gate open.
// So they always drain, no order of peers can block them, and a failure needs no way to unblock
// them.
//
// Handlers run on XLA's threads: what takes a Queue makes the device current by itself and only
// queues. What runs on threads of this library makes it current for good.
class StreamSpace final : public Space, public std::enable_shared_from_this<StreamSpace> {
 public:
  // The same options give the same space, which lives until the process ends: streams of XLA may
  // hold its words at any time. Errors name what is missing.
  static Status Open(const StreamSpaceOptions& options, std::shared_ptr<StreamSpace>* space);

  std::string platform() const override { return PlatformName(gpu_.vendor()); }
  std::string name() const override { return gpu_.name(); }
  bool addressable() const override { return false; }
  Status MakeCopier(Direction direction, size_t slot_bytes,
                    std::unique_ptr<Copier>* copier) override;
  Status Register(void* data, size_t bytes, std::unique_ptr<SlotMemory>* memory) override;
  Status Allocate(size_t bytes, std::unique_ptr<SlotMemory>* memory) override;
  Status AllocateOnDevice(size_t bytes, std::unique_ptr<SlotMemory>* memory,
                          DmaBuf* dmabuf) override;
  Status MakeDeviceCopier(Direction direction, std::unique_ptr<Copier>* copier) override;
  void Expect(std::byte*, size_t) override {}
  Status Zero(std::byte* data, size_t bytes, Queue queue) override;
  Status MarkStart(Queue queue, std::shared_ptr<Gate>* gate) override;
  SpaceStats Stats() const override;

  StreamSync sync() const { return sync_; }
  const Gpu& gpu() const { return gpu_; }

  // The rest is for handlers. Queues a hold, fills, or a copy within the device. The first hold of
  // a stream makes sure that the copy streams run on while that stream is held; this alone waits,
  // for what the stream still has to do. *hold stays null while a section of exclusion() is open,
  // and while more streams are held than there are flags for.
  Status HoldQueue(Queue queue, std::shared_ptr<Hold>* hold);
  Status Fill(const std::vector<FillRange>& ranges, Queue queue);
  Status Copy(std::byte* to, const std::byte* from, size_t bytes, Queue queue);
  // Fills and waits until it is done, on a thread of ours that may wait for the device. After the
  // bound an error: a stream that is held may hold the fill up, which then runs when that stream is
  // released. The bound does not cover the driver's own calls.
  Status FillNow(const std::vector<FillRange>& ranges, Duration bound);
  // Whether the driver says that the device is lost to this process. On a thread of ours.
  bool Lost();

  // Of holds and what must not meet them: a driver call that waits for the device while nobody else
  // can call the driver (loads of modules and kernels, allocations) would wait for a held stream,
  // and the copies that the stream is held for, for that call. Open a section around such calls.
  Exclusion& exclusion() { return exclusion_; }
  // How long Register, Allocate and AllocateOnDevice wait in a section of theirs, which is longer
  // than any exchange takes to end.
  void SetHoldBound(Duration bound) { hold_bound_.store(bound.count()); }

  // A network card's writes into device memory can be seen by work that starts after this, where
  // the hardware does not see to it by itself. For transports whose flag the host sees. Any thread
  // of ours.
  Status OrderRemoteWrites() override;
  bool orders_remote_writes() const;

 private:
  friend class StreamCopier;
  friend class StreamGate;
  friend class StreamHold;
  friend class PinnedMemory;
  friend class DeviceMemory;

  StreamSpace(const Gpu& gpu, StreamSync sync);
  Status Initialise();
  // Calls the driver for memory, which may wait for the device: in a section and while no stream is
  // held. An error after the bound.
  Status Acquire(const char* purpose, const std::function<Status()>& call);
  // The same to give memory back, which cannot fail: after the bound the driver itself waits.
  void GiveBack(const std::function<Status()>& call);
  // Uses each kind of work once: drivers load their kernels at the first use, which would wait for
  // streams that are held.
  Status WarmUp();
  // Makes the device current on a thread of ours, for good.
  Status Enter() const;
  Status FillOn(const FillRange& range, Stream stream) const;
  // Streams share the hardware's queues, and a held stream holds up all streams of its queue: copy
  // streams that share one with this stream are replaced.
  Status Separate(Stream held);
  Status TrySeparate(Stream held, bool* separate);
  // Waits until the stream has done what is queued in it.
  Status AwaitIdle(Stream stream);
  // Queues marks in the copy streams and sees which streams run, with copy_streams_mutex_ held.
  struct Running {
    bool out = false;
    bool in = false;
  };
  Status SeeRunning(Running* running);
  // Whether a mark gets through the stream within the bound.
  Status Passes(Stream stream, Duration bound, bool* passes);
  // Stays valid while copy_streams_mutex_ is held.
  Stream copy_stream(Direction direction) const {
    return (direction == Direction::kOut ? out_ : in_).load(std::memory_order_acquire);
  }

  const Gpu& gpu_;
  const StreamSync sync_;
  std::atomic<Stream> out_{nullptr};
  std::atomic<Stream> in_{nullptr};
  Stream clock_ = nullptr;  // nothing is queued there but marks, see separation.cc
  // Held exclusively while the copy streams are tried or replaced, shared by whoever uses one.
  mutable std::shared_mutex copy_streams_mutex_;
  Allocations allocations_;
  MarkPool marks_;  // of the programs' streams
  // Of the copy streams. Events: a copy engine records them itself, while a written word is the
  // work of another engine, so that each copy would wait for the one before and its word.
  MarkPool copy_marks_;
  FlagPool flags_;
  Exclusion exclusion_;
  std::atomic<Duration::rep> hold_bound_;
  std::mutex separation_mutex_;  // held while one stream is being tried
  std::set<Stream> separate_;    // guarded by it
};

}  // namespace hetccl::device

#endif  // XLA_FFI_DEVICE_STREAM_STREAM_SPACE_H_
