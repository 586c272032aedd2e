// What tests between two real ports share: both ends of a channel, or one of them and a peer by
// hand. Skipped where there are no ports; see tests/rdma.
#ifndef XLA_FFI_TRANSPORT_RDMA_TEST_CHANNEL_H_
#define XLA_FFI_TRANSPORT_RDMA_TEST_CHANNEL_H_

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "xla_ffi/device/host_space.h"
#include "xla_ffi/transport/rdma/factory.h"
#include "xla_ffi/transport/rdma/line.h"
#include "xla_ffi/transport/rdma/test_ports.h"
#include "xla_ffi/transport/span_cursor.h"

namespace hetccl::transport::rdma {

inline constexpr auto kPatience = std::chrono::seconds(20);

// The other end, by hand: does as it is told, not as it should.
class HandMade {
 public:
  HandMade(int socket, const Options& options) : line_(UniqueFd(socket), options) {}

  // `receives`: how many it posts, of those that it should.
  Status Open(uint32_t receives) {
    mine_.role = Role::kReceiver;
    return line_.Open({16, receives}, &mine_);
  }
  void UseMemory(void* data, size_t bytes) {
    ASSERT_TRUE(line_.device()
                    ->Register(data, bytes, abi::kAccessLocalWrite | abi::kAccessRemoteWrite,
                               &registration_)
                    .ok());
    SetSlots(reinterpret_cast<uint64_t>(data), registration_->rkey());
  }
  void SetSlots(uint64_t address, uint32_t rkey) {
    mine_.address = address;
    mine_.rkey = rkey;
    mine_.slot_bytes = 4096;
    mine_.slots = 4;
  }
  Status Meet() {
    Status status =
        line_.device()->Register(&words_, sizeof(words_), abi::kAccessLocalWrite, &words_key_);
    if (!status.ok()) return status;
    return line_.Meet(mine_, &words_, words_key_->lkey());
  }
  // Writes grants into the sender's board.
  Status Offer(const Grant& grant) {
    words_.grants[0] = grant;
    Write write = {words_.grants, words_key_->lkey(), sizeof(Grant),
                   line_.theirs().address + offsetof(SenderBoard, grants), line_.theirs().rkey};
    write.has_immediate = true;
    write.immediate = Pack(Immediate::kGrant, 1);
    return line_.queue_pair().Post(write);
  }
  Status Tell(uint32_t immediate) {
    Write write = {&words_, words_key_->lkey(), 0, line_.theirs().address, line_.theirs().rkey};
    write.has_immediate = true;
    write.immediate = immediate;
    return line_.queue_pair().Post(write);
  }
  Line& line() { return line_; }
  EndpointRecord& record() { return mine_; }

 private:
  Line line_;
  EndpointRecord mine_;
  SenderBoard words_ = {};
  std::shared_ptr<Registration> registration_, words_key_;
};

class Channel : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why_not;
    ports_ = TestPorts(&why_not);
    if (ports_.empty()) GTEST_SKIP() << why_not;
    int fds[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    here_ = UniqueFd(fds[0]);
    there_ = UniqueFd(fds[1]);
  }

  Status MakeOurSender(const Staging& staging = {}) {
    std::vector<UniqueFd> sockets;
    sockets.push_back(std::move(here_));
    return MakeSender(std::move(sockets), space_, staging, ports_[0], &sender_);
  }
  Status MakeOurReceiver(const Staging& staging = {}) {
    std::vector<UniqueFd> sockets;
    sockets.push_back(std::move(there_));
    return MakeReceiver(std::move(sockets), space_, staging, ports_[1], &receiver_);
  }
  void MakeBoth() {
    Status status;
    std::thread other([&] { status = MakeOurSender(); });
    const Status received = MakeOurReceiver();
    other.join();
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(received.ok()) << received.message();
  }
  // Our sender and a peer by hand, which `prepare` sets up after Open.
  void MakeWithHandMade(uint32_t receives, const std::function<void(HandMade*)>& prepare) {
    peer_ = std::make_unique<HandMade>(there_.release(), ports_[1]);
    Status status;
    std::thread other([&] { status = MakeOurSender(); });
    Status met = peer_->Open(receives);
    if (met.ok()) prepare(peer_.get());
    if (met.ok()) met = peer_->Meet();
    other.join();
    ASSERT_TRUE(met.ok()) << met.message();
    ASSERT_TRUE(status.ok()) << status.message();
  }

  void Begin(const std::vector<std::byte>& bytes) { BeginFrom({bytes.data(), bytes.size()}); }
  void BeginFrom(ConstSpan bytes) {
    WireHeader header = MakeHeader(MessageType::kData);
    header.payload_bytes = bytes.size;
    sender_->Begin(header, {bytes});
  }
  // The same with a peer that has asked to grant memory itself, and a message that waits for that.
  void BeginTowardsGrants(const std::vector<std::byte>& bytes) {
    grants_slots_.resize(4 * 4096);
    MakeWithHandMade(8, [&](HandMade* peer) {
      peer->UseMemory(grants_slots_.data(), grants_slots_.size());
      peer->record().flags = kGrantsMemory;
    });
    Begin(bytes);
    Progress progress;
    ASSERT_TRUE(sender_->Step(&progress).ok());
  }
  // Steps until there is an error.
  Status SenderFails() {
    const TimePoint deadline = Clock::now() + kPatience;
    Progress progress;
    while (Clock::now() < deadline) {
      if (Status status = sender_->Step(&progress); !status.ok()) return status;
      std::this_thread::yield();
    }
    return Status();
  }
  // Moves one message; false if an error came.
  bool Move(const std::vector<std::byte>& bytes, std::vector<std::byte>* received) {
    Begin(bytes);
    return Finish(received);
  }
  bool Finish(std::vector<std::byte>* received) {
    return FinishInto([received](size_t bytes) -> MutableSpan {
      received->assign(bytes, std::byte{0});
      return {received->data(), bytes};
    });
  }
  // `place` says where a message of so many bytes is to go.
  bool FinishInto(const std::function<MutableSpan(size_t)>& place) {
    Progress out, in;
    const WireHeader* header = nullptr;
    const TimePoint deadline = Clock::now() + kPatience;
    while (!(in.done && out.done) && Clock::now() < deadline) {
      if (!out.done && !sender_->Step(&out).ok()) return false;
      if (in.done) continue;
      if (header == nullptr) {
        if (!receiver_->Peek(&header).ok()) return false;
        if (header == nullptr) continue;
        receiver_->Accept({place(header->payload_bytes)});
      }
      if (!receiver_->Step(&in).ok()) return false;
    }
    return in.done && out.done;
  }

  std::vector<Options> ports_;
  UniqueFd here_, there_;
  std::vector<std::byte> grants_slots_;
  device::HostSpace space_;
  std::unique_ptr<Sender> sender_;
  std::unique_ptr<Receiver> receiver_;
  std::unique_ptr<HandMade> peer_;
};

}  // namespace hetccl::transport::rdma

#endif  // XLA_FFI_TRANSPORT_RDMA_TEST_CHANNEL_H_
