// Slots in a device's own memory, for NICs that reach it.
#include <utility>

#include "xla_ffi/device/stream/stream_copier.h"
#include "xla_ffi/device/stream/stream_space.h"

namespace hetccl::device {

class DeviceMemory final : public SlotMemory {
 public:
  DeviceMemory(std::shared_ptr<StreamSpace> space, void* data)
      : space_(std::move(space)), data_(data) {}
  ~DeviceMemory() override {
    space_->GiveBack([&] { return space_->gpu_.MemFree(data_); });
  }
  std::byte* data() const override { return static_cast<std::byte*>(data_); }

 private:
  const std::shared_ptr<StreamSpace> space_;
  void* const data_;
};

Status StreamSpace::AllocateOnDevice(size_t bytes, std::unique_ptr<SlotMemory>* memory,
                                     DmaBuf* dmabuf) {
  return Acquire("allocating device memory", [&] {
    void* data = nullptr;
    if (Status status = gpu_.MemAlloc(bytes, &data); !status.ok()) return status;
    *memory = std::make_unique<DeviceMemory>(shared_from_this(), data);
    int descriptor = -1;
    Status exported = gpu_.capabilities().dma_buf
                          ? gpu_.ExportDmaBuf(data, bytes, &descriptor, &dmabuf->offset)
                          : InternalError("the driver exports none of " + gpu_.name());
    dmabuf->descriptor = UniqueFd(descriptor);
    if (!exported.ok()) dmabuf->why_not = exported.message();
    return Status();
  });
}

Status StreamSpace::MakeDeviceCopier(Direction direction, std::unique_ptr<Copier>* copier) {
  auto made = std::make_unique<StreamCopier>(shared_from_this(), direction, SlotsOn::kDevice);
  if (Status status = made->Initialise(); !status.ok()) return status;
  *copier = std::move(made);
  return Status();
}

}  // namespace hetccl::device
