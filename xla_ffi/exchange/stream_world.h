// A GPU's side of an exchange over a test twin of the driver. For tests only.
#ifndef XLA_FFI_EXCHANGE_STREAM_WORLD_H_
#define XLA_FFI_EXCHANGE_STREAM_WORLD_H_

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "xla_ffi/common/test_status.h"
#include "xla_ffi/device/stream/stream_space.h"
#include "xla_ffi/device/stream/test_end.h"
#include "xla_ffi/device/twin/control.h"
#include "xla_ffi/exchange/stream_calls.h"
#include "xla_ffi/exchange/test_world.h"

namespace hetccl {

// What a program on a device does: one stream, buffers in device memory, start, done. Not
// thread-safe: used by the test's thread, as XLA would use one of its own.
class DeviceProgram {
 public:
  DeviceProgram(Engine& engine, std::shared_ptr<device::StreamSpace> space, uint32_t rank)
      : engine_(engine), space_(std::move(space)), gpu_(space_->gpu()), rank_(rank) {
    const device::ScopedCurrent current(gpu_);
    EXPECT_OK(gpu_.StreamCreate(false, &stream_));
  }
  ~DeviceProgram() {
    const device::ScopedCurrent current(gpu_);
    EXPECT_OK(gpu_.StreamSynchronize(stream_));
    for (void* memory : memory_) EXPECT_OK(gpu_.MemFree(memory));
    EXPECT_OK(gpu_.StreamDestroy(stream_));
  }

  struct Swap {
    std::byte* sent = nullptr;
    std::byte* received = nullptr;
    uint64_t plan = 0;
    size_t bytes = 0;
    device::Pattern poison{{0, 0, 0xC0, 0x7F}, 4};  // float32
  };

  // Buffers of `count` floats; those to be sent are all `value`, those to be received -1.
  Swap Make(uint64_t plan, size_t count, float value) {
    Swap swap;
    swap.plan = plan;
    swap.bytes = count * sizeof(float);
    swap.sent = Allocate(swap.bytes);
    swap.received = Allocate(swap.bytes);
    Fill(swap.sent, count, value);
    Fill(swap.received, count, -1);
    return swap;
  }
  void Fill(std::byte* data, size_t count, float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof(word));
    const device::ScopedCurrent current(gpu_);
    if (count > 0) EXPECT_OK(gpu_.MemsetD32Async(data, word, count, stream_));
  }

  Status Start(const Swap& swap, const Call& call = {}) {
    StreamStart start;
    start.request.plan = swap.plan;
    start.request.program = call.program;
    start.request.index = call.index;
    start.request.device_ordinal = gpu_.ordinal();
    start.request.queue = stream_;
    start.request.sends = {{swap.sent, swap.bytes}};
    start.request.receives = {{swap.received, swap.bytes}};
    start.receives = {{swap.received, swap.bytes, swap.poison}};
    start.passed = {{chain(1), chain(0), 16}};
    start.defined = {{chain(2), 16, device::Pattern{{}, 0}}};
    return StartOnStream(engine_, start);
  }
  Status Done(const Swap& swap) {
    StreamDone done;
    done.device_ordinal = gpu_.ordinal();
    done.plan = swap.plan;
    done.queue = stream_;
    done.receives = {{swap.received, swap.bytes, swap.poison}};
    done.sends = {swap.sent};
    done.passed = {{chain(0), chain(1), 16}};
    return DoneOnStream(engine_, done);
  }

  // Waits for the program's end, at most `bound`; false if it did not come.
  bool Ends(Duration bound = std::chrono::seconds(20)) {
    const device::ScopedCurrent current(gpu_);
    const TimePoint deadline = Clock::now() + bound;
    bool done = false;
    while (!done && Clock::now() < deadline) {
      EXPECT_OK(gpu_.StreamQuery(stream_, &done));
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return done;
  }
  // What lies there once the program has ended.
  std::vector<float> Read(const std::byte* data, size_t bytes) {
    if (!Ends()) {
      ADD_FAILURE() << "the program never ended";
      return {};
    }
    std::vector<float> values(bytes / sizeof(float));
    const device::ScopedCurrent current(gpu_);
    if (bytes > 0) EXPECT_OK(gpu_.MemcpyDtoHAsync(values.data(), data, bytes, stream_));
    EXPECT_OK(gpu_.StreamSynchronize(stream_));
    return values;
  }

  device::Stream stream() const { return stream_; }
  const device::Gpu& gpu() const { return gpu_; }
  device::StreamSpace& space() const { return *space_; }
  std::byte* Allocate(size_t bytes) {
    const device::ScopedCurrent current(gpu_);
    void* memory = nullptr;
    EXPECT_OK(gpu_.MemAlloc(bytes + 256, &memory));
    memory_.push_back(memory);
    return static_cast<std::byte*>(memory);
  }

 private:
  std::byte* chain(int number) {
    if (chains_ == nullptr) chains_ = Allocate(64);
    return chains_ + 16 * number;
  }

  Engine& engine_;
  const std::shared_ptr<device::StreamSpace> space_;
  const device::Gpu& gpu_;
  const uint32_t rank_;
  device::Stream stream_ = nullptr;
  std::byte* chains_ = nullptr;
  std::vector<void*> memory_;
};

enum class Peer { kGpu, kHost };

struct Setup {
  device::Vendor vendor;
  std::string sync;
  Wire wire;
  Peer peer;
};

inline std::string Name(const Setup& setup) {
  return std::string(device::PlatformName(setup.vendor)) + "_" + setup.sync + "_" +
         (setup.wire == Wire::kShm ? "shm" : "tcp") + (setup.peer == Peer::kGpu ? "_gpu" : "_host");
}

// Rank 0 is a GPU; rank 1 another one or a host.
class StreamFixture : public ::testing::TestWithParam<Setup> {
 protected:
  StreamFixture() { Connect(TestWorld::Quick()); }

  // Two programs that host functions hold want two drivers, as two processes have them.
  device::Vendor RightVendor() const {
    if (GetParam().sync == "memops") return GetParam().vendor;
    return GetParam().vendor == device::Vendor::kCuda ? device::Vendor::kHip
                                                      : device::Vendor::kCuda;
  }
  void Connect(const EngineOptions& options) {
    Open(options);
    world_->Connect(GetParam().wire);
  }
  // Without channels.
  void Open(const EngineOptions& options) {
    left_.reset();
    right_.reset();
    world_ = std::make_unique<TestWorld>(options, options);
    for (int rank = 0; rank < (GetParam().peer == Peer::kGpu ? 2 : 1); ++rank) {
      device::StreamSpaceOptions open;
      open.vendor = rank == 0 ? GetParam().vendor : RightVendor();
      open.ordinal = rank;
      open.sync = GetParam().sync;
      open.library = twin::Library(open.vendor);
      std::shared_ptr<device::StreamSpace> space;
      EXPECT_OK(device::StreamSpace::Open(open, &space));
      world_->SetGpu(rank, space);
      (rank == 0 ? left_ : right_) =
          std::make_unique<DeviceProgram>(world_->engine(rank), space, rank);
    }
  }

  // One exchange of `count` floats, left's value against right's.
  struct Both {
    DeviceProgram::Swap left, right;
    std::unique_ptr<Running> host;
    size_t count;
    float left_value, right_value;
  };
  Both StartBoth(const Call& call, size_t count, float left_value, float right_value) {
    Both both{
        left_->Make(call.plan, count, left_value), {}, nullptr, count, left_value, right_value};
    EXPECT_OK(left_->Start(both.left, call));
    if (right_ != nullptr) {
      both.right = right_->Make(call.plan, count, right_value);
      EXPECT_OK(right_->Start(both.right, call));
    } else {
      both.host = world_->Start(1, call, count, right_value);
    }
    return both;
  }
  void DoneBoth(Both& both) {
    EXPECT_OK(left_->Done(both.left));
    if (right_ != nullptr) EXPECT_OK(right_->Done(both.right));
  }
  void ExpectSwapped(Both& both) {
    const std::vector<float> left = left_->Read(both.left.received, both.left.bytes);
    EXPECT_EQ(left, std::vector<float>(both.count, both.right_value));
    const std::vector<float> expected(both.count, both.left_value);
    if (right_ != nullptr) {
      EXPECT_EQ(right_->Read(both.right.received, both.right.bytes), expected);
    } else {
      EXPECT_FALSE(both.host->Failed());
      EXPECT_EQ(both.host->received, expected);
    }
  }

  const twin::Control control_{twin::Library(GetParam().vendor)};
  std::unique_ptr<TestWorld> world_;
  std::unique_ptr<DeviceProgram> left_, right_;  // end before the world
};

// All of them; for sanitizers the half in which any three of the four choices still come in every
// combination.
inline std::vector<Setup> Setups() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr bool kHalf = true;
#else
  constexpr bool kHalf = false;
#endif
  std::vector<Setup> all;
  for (int bits = 0; bits < 16; ++bits) {
    if (kHalf && __builtin_parity(bits)) continue;
    all.push_back({bits & 8 ? device::Vendor::kHip : device::Vendor::kCuda,
                   bits & 4 ? "hostfunc" : "memops", bits & 2 ? Wire::kTcp : Wire::kShm,
                   bits & 1 ? Peer::kHost : Peer::kGpu});
  }
  return all;
}

}  // namespace hetccl

#endif  // XLA_FFI_EXCHANGE_STREAM_WORLD_H_
