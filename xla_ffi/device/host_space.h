// Buffers in host memory.
#ifndef XLA_FFI_DEVICE_HOST_SPACE_H_
#define XLA_FFI_DEVICE_HOST_SPACE_H_

#include <cstddef>
#include <memory>

#include "xla_ffi/device/copy_pool.h"
#include "xla_ffi/device/space.h"

namespace hetccl::device {

// Slots from this size on are those of a pair with a GPU, whose link is faster than one core
// copies: several threads share the copies then.
inline constexpr size_t kSharedCopyFrom = 1 << 20;

// Copies smaller slots on the calling thread.
class HostSpace final : public Space {
 public:
  // `copy_threads` 0: by the number of cores. They start when the first large slots are used.
  explicit HostSpace(int copy_threads = 0);

  std::string platform() const override { return "cpu"; }
  std::string name() const override { return "host memory"; }
  bool addressable() const override { return true; }
  Status MakeCopier(Direction direction, size_t slot_bytes,
                    std::unique_ptr<Copier>* copier) override;
  Status Register(void* data, size_t bytes, std::unique_ptr<SlotMemory>* memory) override;
  Status Allocate(size_t bytes, std::unique_ptr<SlotMemory>* memory) override;
  void Expect(std::byte* data, size_t bytes) override;
  Status Zero(std::byte* data, size_t bytes, Queue queue) override;
  Status MarkStart(Queue queue, std::shared_ptr<Gate>* gate) override;
  SpaceStats Stats() const override;
  // Joins the copy threads; requires that nothing is being copied or will be.
  void Close() { pool_->Stop(); }

 private:
  const std::shared_ptr<CopyPool> pool_;
};

}  // namespace hetccl::device

#endif  // XLA_FFI_DEVICE_HOST_SPACE_H_
