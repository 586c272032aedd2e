// The shared memory comes from another process: it is not trusted.
#include "xla_ffi/transport/shm/segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <vector>

#include "xla_ffi/device/host_space.h"
#include "xla_ffi/transport/shm/factory.h"

namespace hetccl::transport::shm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

UniqueFd Plain(size_t bytes, bool sealable) {
  UniqueFd fd(::memfd_create("test", sealable ? MFD_ALLOW_SEALING : 0));
  EXPECT_EQ(::ftruncate(fd.get(), bytes), 0);
  return fd;
}

TEST(Segment, CreatesWhatItMaps) {
  UniqueFd fd;
  ASSERT_TRUE(Segment::Create(8192, 3, &fd).ok());
  Segment segment;
  ASSERT_TRUE(segment.Map(fd).ok());
  EXPECT_EQ(segment.slot_bytes(), 8192u);
  EXPECT_EQ(segment.slots(), 3u);
  EXPECT_EQ(segment.slot(3), segment.slot(0));
  EXPECT_EQ(segment.slot(2) - segment.slot(1), 8192);
  struct stat info = {};
  ASSERT_EQ(::fstat(fd.get(), &info), 0);
  EXPECT_NE(::ftruncate(fd.get(), 0), 0) << "nobody may shrink it";
  EXPECT_NE(::ftruncate(fd.get(), info.st_size + 4096), 0) << "nobody may make it grow";
  EXPECT_NE(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE), 0) << "nobody may seal it against use";
  EXPECT_EQ(::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST(Segment, RefusesSizesThatMakeNoSense) {
  UniqueFd fd;
  EXPECT_FALSE(Segment::Create(100, 4, &fd).ok());
  EXPECT_FALSE(Segment::Create(8192, 1, &fd).ok());
  EXPECT_FALSE(Segment::Create(8192, 100000, &fd).ok());
  EXPECT_FALSE(Segment::Create(8192 + 1, 4, &fd).ok());
}

TEST(Segment, RefusesForeignMemory) {
  EXPECT_FALSE(Segment().Map(UniqueFd()).ok());
  EXPECT_FALSE(Segment().Map(Plain(100000, true)).ok()) << "not sealed";
  UniqueFd empty = Plain(100000, true);
  ASSERT_EQ(::fcntl(empty.get(), F_ADD_SEALS, kSeals), 0);
  EXPECT_FALSE(Segment().Map(empty).ok()) << "not a segment";
  UniqueFd tiny = Plain(10, true);
  ASSERT_EQ(::fcntl(tiny.get(), F_ADD_SEALS, kSeals), 0);
  EXPECT_FALSE(Segment().Map(tiny).ok());
}

TEST(Segment, RefusesMemoryThatItsMakerMayStillResize) {
  UniqueFd made;
  ASSERT_TRUE(Segment::Create(4096, 2, &made).ok());
  struct stat info = {};
  ASSERT_EQ(::fstat(made.get(), &info), 0);
  std::vector<char> bytes(info.st_size);
  ASSERT_EQ(::pread(made.get(), bytes.data(), bytes.size(), 0), info.st_size);
  // The same bytes under each smaller set of seals.
  for (int seals : {0, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SHRINK | F_SEAL_GROW}) {
    UniqueFd copy = Plain(bytes.size(), true);
    ASSERT_EQ(::pwrite(copy.get(), bytes.data(), bytes.size(), 0), info.st_size);
    ASSERT_EQ(::fcntl(copy.get(), F_ADD_SEALS, seals), 0);
    EXPECT_FALSE(Segment().Map(copy).ok()) << seals;
    ASSERT_EQ(::fcntl(copy.get(), F_ADD_SEALS, kSeals), 0);
    EXPECT_TRUE(Segment().Map(copy).ok());
  }
}

class BadPeer : public ::testing::Test {
 protected:
  BadPeer() {
    EXPECT_TRUE(MakeSegment(4096, 2, &memfd_).ok());
    EXPECT_TRUE(mapped_.Map(memfd_).ok());
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    other_ = UniqueFd(fds[1]);
    fds_.emplace_back(fds[0]);
    fds_.emplace_back(::dup(memfd_.get()));
  }

  device::HostSpace space_;
  UniqueFd memfd_, other_;
  Segment mapped_;  // what the faulty peer writes to
  std::vector<UniqueFd> fds_;
};

TEST_F(BadPeer, ASenderThatFillsMoreThanThereIsIsCorrupt) {
  std::unique_ptr<Receiver> receiver;
  ASSERT_TRUE(MakeReceiver(std::move(fds_), space_, &receiver).ok());
  mapped_.control().published.store(3);
  const WireHeader* header = nullptr;
  const Status status = receiver->Peek(&header);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.kind(), ErrorKind::kCorrupt);
}

TEST_F(BadPeer, AReceiverThatFreesMoreThanThereIsIsCorrupt) {
  std::unique_ptr<Sender> sender;
  ASSERT_TRUE(MakeSender(std::move(fds_), space_, &sender).ok());
  mapped_.control().freed.store(1);
  sender->Begin(MakeHeader(MessageType::kData), {});
  Progress progress;
  const Status status = sender->Step(&progress);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.kind(), ErrorKind::kCorrupt);
}

TEST_F(BadPeer, AHeaderOfGarbageIsCorrupt) {
  std::unique_ptr<Receiver> receiver;
  ASSERT_TRUE(MakeReceiver(std::move(fds_), space_, &receiver).ok());
  mapped_.control().published.store(1);
  const WireHeader* header = nullptr;
  EXPECT_EQ(receiver->Peek(&header).kind(), ErrorKind::kCorrupt);
}

TEST(Factory, WantsASocketAndAMemfd) {
  device::HostSpace space;
  std::unique_ptr<Sender> sender;
  EXPECT_FALSE(MakeSender({}, space, &sender).ok());
}

}  // namespace
}  // namespace hetccl::transport::shm
