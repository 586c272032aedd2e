#include "xla_ffi/device/host_space.h"

#include <cstring>
#include <utility>
#include <vector>

#include "xla_ffi/common/copy.h"
#include "xla_ffi/device/host_memory.h"

namespace hetccl::device {
namespace {

class InlineCopier final : public Copier {
 public:
  int depth() const override { return 1; }
  Status Submit(const CopyPiece* pieces, size_t count, bool past_cache) override {
    for (size_t i = 0; i < count; ++i) {
      Copy(pieces[i].to, pieces[i].from, pieces[i].bytes, past_cache);
    }
    ++ended_;
    return Status();
  }
  Status Poll(uint64_t* ended) override {
    *ended = ended_;
    return Status();
  }
  bool Quiet() override { return true; }

 private:
  uint64_t ended_ = 0;
};

class ForeignMemory final : public SlotMemory {
 public:
  explicit ForeignMemory(void* data) : data_(static_cast<std::byte*>(data)) {}
  std::byte* data() const override { return data_; }

 private:
  std::byte* const data_;
};

class OwnMemory final : public SlotMemory {
 public:
  explicit OwnMemory(size_t bytes) : bytes_(bytes) {}
  std::byte* data() const override { return bytes_.data(); }

 private:
  mutable std::vector<std::byte> bytes_;
};

}  // namespace

HostSpace::HostSpace(int copy_threads) : pool_(std::make_shared<CopyPool>(copy_threads)) {}

Status HostSpace::MakeCopier(Direction, size_t slot_bytes, std::unique_ptr<Copier>* copier) {
  if (slot_bytes < kSharedCopyFrom) {
    *copier = std::make_unique<InlineCopier>();
  } else {
    *copier = MakePoolCopier(pool_);
  }
  return Status();
}

Status HostSpace::Register(void* data, size_t, std::unique_ptr<SlotMemory>* memory) {
  *memory = std::make_unique<ForeignMemory>(data);
  return Status();
}

Status HostSpace::Allocate(size_t bytes, std::unique_ptr<SlotMemory>* memory) {
  *memory = std::make_unique<OwnMemory>(bytes);
  return Status();
}

void HostSpace::Expect(std::byte* data, size_t bytes) { PreferHugePages(data, bytes); }

Status HostSpace::Zero(std::byte* data, size_t bytes, Queue) {
  std::memset(data, 0, bytes);
  return Status();
}

Status HostSpace::MarkStart(Queue, std::shared_ptr<Gate>* gate) {
  *gate = nullptr;
  return Status();
}

SpaceStats HostSpace::Stats() const { return {{"copy_threads", pool_->threads()}}; }

}  // namespace hetccl::device
