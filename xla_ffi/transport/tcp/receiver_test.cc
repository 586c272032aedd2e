// What a receiver tells its thread while payloads pass through slots to a device.
#include "xla_ffi/transport/tcp/receiver.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstring>
#include <vector>

#include "xla_ffi/transport/window.h"

namespace hetccl::transport::tcp {
namespace {

// Slots whose copies end when the test says so.
class SlowSpace final : public device::Space {
 public:
  class SlowCopier final : public device::Copier {
   public:
    explicit SlowCopier(SlowSpace* space) : space_(*space) {}
    int depth() const override { return 8; }
    Status Submit(const device::CopyPiece*, size_t, bool) override {
      ++begun_;
      return Status();
    }
    Status Poll(uint64_t* ended) override {
      if (space_.ends) ended_ = begun_;
      *ended = ended_;
      return Status();
    }
    bool Quiet() override { return ended_ == begun_; }

   private:
    SlowSpace& space_;
    uint64_t begun_ = 0, ended_ = 0;
  };
  class Slots final : public device::SlotMemory {
   public:
    explicit Slots(size_t bytes) : bytes_(bytes) {}
    std::byte* data() const override { return const_cast<std::byte*>(bytes_.data()); }

   private:
    std::vector<std::byte> bytes_;
  };

  std::string platform() const override { return "slow"; }
  std::string name() const override { return "slow"; }
  bool addressable() const override { return false; }
  Status MakeCopier(device::Direction, size_t, std::unique_ptr<device::Copier>* copier) override {
    *copier = std::make_unique<SlowCopier>(this);
    return Status();
  }
  Status Register(void*, size_t, std::unique_ptr<device::SlotMemory>*) override {
    return InternalError("not needed");
  }
  Status Allocate(size_t bytes, std::unique_ptr<device::SlotMemory>* memory) override {
    *memory = std::make_unique<Slots>(bytes);
    return Status();
  }
  void Expect(std::byte*, size_t) override {}
  Status Zero(std::byte*, size_t, device::Queue) override { return Status(); }
  Status MarkStart(device::Queue, std::shared_ptr<device::Gate>*) override { return Status(); }
  device::SpaceStats Stats() const override { return {}; }

  bool ends = false;
};

// Nothing comes from the socket any more that would wake the thread: what is there already has to.
TEST(TcpReceiver, AsksForAStepWhenASlotIsFreeAndBytesAreThere) {
  constexpr size_t kBytes = 12000;  // with two slots of 4096, a rest stays behind
  int fds[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  const UniqueFd peer(fds[1]);
  std::vector<std::unique_ptr<Stream>> streams;
  streams.push_back(PlainStream(UniqueFd(fds[0])));
  SlowSpace space;
  std::vector<std::unique_ptr<ReceiveWindow>> windows(1);
  ASSERT_TRUE(MakeWindow(space, Staging{4096, 2}, &windows[0]).ok());
  TcpReceiver receiver(std::move(streams), std::move(windows), /*checksum=*/false);
  WireHeader header = MakeHeader(MessageType::kData);
  header.payload_bytes = kBytes;
  std::vector<std::byte> sent(sizeof(header) + kBytes);
  std::memcpy(sent.data(), &header, sizeof(header));
  ASSERT_EQ(::send(peer.get(), sent.data(), sent.size(), 0), static_cast<ssize_t>(sent.size()));

  const WireHeader* head = nullptr;
  ASSERT_TRUE(receiver.Peek(&head).ok());
  ASSERT_NE(head, nullptr);
  std::vector<std::byte> memory(kBytes);
  receiver.Accept({{memory.data(), memory.size()}});
  Progress progress;
  ASSERT_TRUE(receiver.Step(&progress).ok());
  EXPECT_EQ(progress.bytes, 8192u);
  ASSERT_TRUE(receiver.Step(&progress).ok());
  EXPECT_EQ(progress.bytes, 0u);
  EXPECT_TRUE(progress.copying);
  space.ends = true;
  ASSERT_TRUE(receiver.Step(&progress).ok());  // sees the ends of the copies, behind the reading
  EXPECT_TRUE(progress.bytes > 0 || progress.copying) << "its thread would sleep";
  for (int steps = 0; !progress.done && steps < 10; ++steps) {
    ASSERT_TRUE(receiver.Step(&progress).ok());
  }
  EXPECT_TRUE(progress.done);
}

}  // namespace
}  // namespace hetccl::transport::tcp
