#include "xla_ffi/transport/tcp/tls.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "xla_ffi/transport/tcp/kernel_tls.h"
#include "xla_ffi/transport/tcp/lanes.h"
#include "xla_ffi/transport/tcp/openssl.h"
#include "xla_ffi/transport/tcp/options.h"
#include "xla_ffi/transport/tcp/traffic_secret.h"

namespace hetccl::transport::tcp {
namespace {

using openssl::Bio;
using openssl::Library;
using openssl::Session;
using openssl::Ssl;

constexpr size_t kReadAhead = 256 * 1024;  // of the socket at once, instead of each record in two
constexpr char kCipherName[] = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char kCipher[2] = {0x13, 0x01};
constexpr unsigned char kIdentity[] = "hetccl channel";
constexpr int kAppData = 0;  // the index of ex_data that is the application's

// The socket as OpenSSL sees it. Its own socket BIO raises SIGPIPE when the peer is gone.
struct Socket {
  int fd;
  bool kernel_sends = false;  // and would encrypt OpenSSL's records once more
  bool ended = false;
  int error = 0;  // an errno value
};

int Done(Bio* bio, ssize_t bytes, int direction) {
  const Library* library = nullptr;
  if (!openssl::Load(&library).ok()) return -1;
  auto* socket = static_cast<Socket*>(library->bio_get_data(bio));
  library->bio_clear_flags(bio, openssl::kBioRetryFlags);
  if (bytes > 0) return static_cast<int>(bytes);
  if (bytes == 0) {
    socket->ended = true;
    return 0;
  }
  if (errno == EAGAIN || errno == EWOULDBLOCK) {
    library->bio_set_flags(bio, direction | openssl::kBioShouldRetry);
  } else {
    socket->error = errno;
  }
  return -1;
}

Socket* SocketOf(Bio* bio) {
  const Library* library = nullptr;
  return openssl::Load(&library).ok() ? static_cast<Socket*>(library->bio_get_data(bio)) : nullptr;
}

int BioRead(Bio* bio, char* data, int bytes) {
  const Socket* socket = SocketOf(bio);
  if (socket == nullptr) return -1;
  ssize_t count;
  do {
    count = ::recv(socket->fd, data, static_cast<size_t>(bytes), MSG_DONTWAIT);
  } while (count < 0 && errno == EINTR);
  return Done(bio, count, openssl::kBioRead);
}

int BioWrite(Bio* bio, const char* data, int bytes) {
  const Socket* socket = SocketOf(bio);
  if (socket == nullptr || socket->kernel_sends) return -1;
  ssize_t count;
  do {
    count = ::send(socket->fd, data, static_cast<size_t>(bytes), MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (count < 0 && errno == EINTR);
  return Done(bio, count, openssl::kBioWrite);
}

long BioControl(Bio*, int command, long, void*) {
  return command == openssl::kBioCtrlFlush ? 1 : 0;  // nothing is kept back
}

Bio* NewBio(const Library& library, Socket* socket) {
  static openssl::BioMethod* const method = [&] {
    auto* made =
        library.bio_meth_new(library.bio_get_new_index() | openssl::kBioSourceSink, "hetccl");
    if (made != nullptr) {
      library.bio_meth_set_read(made, &BioRead);
      library.bio_meth_set_write(made, &BioWrite);
      library.bio_meth_set_ctrl(made, &BioControl);
    }
    return made;
  }();
  Bio* bio = method == nullptr ? nullptr : library.bio_new(method);
  if (bio != nullptr) {
    library.bio_set_data(bio, socket);
    library.bio_set_init(bio, 1);
  }
  return bio;
}

class Tls final : public Stream {
 public:
  using Stream::Receive;
  using Stream::Send;

  Tls(UniqueFd fd, const TlsOptions& options, const Library& library)
      : Stream(std::move(fd)),
        path_(PathName(this->fd())),
        options_(options),
        library_(library),
        socket_{this->fd()} {}
  ~Tls() override {
    if (ssl_ != nullptr) library_.free(ssl_);
  }

  // Makes this end, without a word to the peer.
  Status Prepare();
  Status Handshake();

  Moved Send(const iovec* pieces, int count) override;
  Moved Receive(const iovec* pieces, int count) override;
  void EndSending() override;
  bool Drained() override;

 private:
  static int UseSession(Ssl* ssl, const openssl::Digest*, const unsigned char** id,
                        size_t* id_bytes, Session** session);
  static int FindSession(Ssl* ssl, const unsigned char* id, size_t id_bytes, Session** session);
  static void KeepSecret(const Ssl* ssl, const char* line);
  // Lets the kernel send, if it can.
  void HandOver();
  // What stands for the key in OpenSSL; null if there is no memory.
  Session* MakeSession() const;
  Status Failure(const std::string& reason) const {
    return InternalError("TLS" + (path_.empty() ? "" : " from " + path_) + ": " + reason);
  }
  // Before each call of OpenSSL: its errors are kept for each thread, and ours for each call.
  void Clear() {
    library_.err_clear_error();
    socket_.error = 0;
  }
  // What a call came to that gave `result`, which is not positive.
  Moved Judge(int result, const char* attempt);
  // What the last call's errors say. `*altered`: that a record was not what the peer had sent.
  std::string Reason(bool* altered = nullptr);

  const std::string path_;  // taken early: a socket that was reset no longer knows its peer
  TlsOptions options_;
  const Library& library_;
  Socket socket_;
  Ssl* ssl_ = nullptr;
  uint64_t records_ = 0;  // sent with the present key
  std::vector<char> record_;
  Moved failed_;                       // stays: nothing moves any more
  Moved broken_;                       // stays for receiving: the socket tells of its error once
  TrafficSecret secret_;               // of what this end sends, on the way to the kernel
  std::unique_ptr<KernelTls> kernel_;  // null: OpenSSL sends
  bool ending_ = false;                // nothing more is sent, but the peer was not told yet
};

Status Tls::Prepare() {
  if (options_.key.size() != kTlsKeyBytes) {
    return Failure("the key has " + std::to_string(options_.key.size()) + " bytes instead of " +
                   std::to_string(kTlsKeyBytes));
  }
  Clear();
  openssl::Ctx* ctx = library_.ctx_new(library_.method());
  if (ctx == nullptr) return Failure(Reason());
  const long modes = openssl::kModePartialWrite | openssl::kModeMovingBuffer;
  // A server that offers a certificate instead of the key has none that could be verified.
  if (options_.role == TlsRole::kClient) {
    library_.ctx_set_verify(ctx, openssl::kVerifyPeer, nullptr);
    // The log is the one way to a secret of OpenSSL's; nothing of it is written anywhere.
    if (options_.in_kernel && WhyNoKernelTls().empty()) {
      library_.ctx_set_keylog_callback(ctx, &KeepSecret);
    }
  }
  library_.ctx_ctrl(ctx, openssl::kCtrlMode, modes, nullptr);
  library_.ctx_ctrl(ctx, openssl::kCtrlReadAhead, 1, nullptr);
  library_.ctx_set_default_read_buffer_len(ctx, kReadAhead);
  library_.ctx_set_psk_use_session_callback(ctx, &UseSession);
  library_.ctx_set_psk_find_session_callback(ctx, &FindSession);
  const bool set =
      library_.ctx_ctrl(ctx, openssl::kCtrlMinVersion, openssl::kTls13, nullptr) == 1 &&
      library_.ctx_set_ciphersuites(ctx, kCipherName) == 1 &&
      library_.ctx_set_num_tickets(ctx, 0) == 1;  // nobody comes back to this connection
  if (set) ssl_ = library_.new_ssl(ctx);
  library_.ctx_free(ctx);  // the connection keeps it
  Bio* bio = ssl_ == nullptr ? nullptr : NewBio(library_, &socket_);
  if (bio == nullptr) return Failure(Reason());
  library_.set_bio(ssl_, bio, bio);
  library_.set_ex_data(ssl_, kAppData, this);
  options_.role == TlsRole::kClient ? library_.set_connect_state(ssl_)
                                    : library_.set_accept_state(ssl_);
  record_.resize(kTlsRecordBytes);
  return Status();
}

Status Tls::Handshake() {
  const TimePoint deadline = Clock::now() + options_.patience;
  while (true) {
    Clear();
    const int result = library_.do_handshake(ssl_);
    if (result == 1) break;
    const bool reads = library_.get_error(ssl_, result) == openssl::kErrorWantRead;
    const Moved moved = Judge(result, "the connection to it broke");
    if (moved.how == Moved::How::kEnd) return Failure("it closed the connection in the handshake");
    if (moved.how != Moved::How::kNothing) return Failure("the handshake failed: " + moved.reason);
    const double left = ToSeconds(deadline - Clock::now());
    if (left <= 0) {
      return Failure("no handshake within " + std::to_string(ToSeconds(options_.patience)) + " s");
    }
    pollfd ready = {fd(), static_cast<short>(reads ? POLLIN : POLLOUT), 0};
    (void)::poll(&ready, 1, static_cast<int>(left * 1000) + 1);
  }
  if (library_.session_reused(ssl_) != 1) {
    return Failure("the peer did not prove that it has the key");
  }
  HandOver();
  return Status();
}

void Tls::HandOver() {
  if (!secret_.known()) return;
  // OpenSSL has sent nothing yet behind the handshake, so the records' numbers begin at 0. Not
  // every socket can, such as a unix one; then OpenSSL goes on.
  socket_.kernel_sends =
      KernelTls::Start(fd(), std::move(secret_), options_.records_per_key, library_, &kernel_).ok();
}

void Tls::KeepSecret(const Ssl* ssl, const char* line) {
  const Library* library = nullptr;
  if (!openssl::Load(&library).ok()) return;
  static_cast<Tls*>(library->get_ex_data(ssl, kAppData))->secret_.Read(line);
}

Session* Tls::MakeSession() const {
  Session* session = library_.session_new();
  const openssl::Cipher* cipher = library_.cipher_find(ssl_, kCipher);
  const auto* key = reinterpret_cast<const unsigned char*>(options_.key.data());
  if (session != nullptr && cipher != nullptr &&
      library_.session_set1_master_key(session, key, options_.key.size()) == 1 &&
      library_.session_set_cipher(session, cipher) == 1 &&
      library_.session_set_protocol_version(session, openssl::kTls13) == 1) {
    return session;
  }
  if (session != nullptr) library_.session_free(session);
  return nullptr;
}

int Tls::UseSession(Ssl* ssl, const openssl::Digest*, const unsigned char** id, size_t* id_bytes,
                    Session** session) {
  const Library* library = nullptr;
  if (!openssl::Load(&library).ok()) return 0;
  *session = static_cast<Tls*>(library->get_ex_data(ssl, kAppData))->MakeSession();
  *id = kIdentity;
  *id_bytes = sizeof(kIdentity) - 1;
  return *session != nullptr ? 1 : 0;
}

int Tls::FindSession(Ssl* ssl, const unsigned char* id, size_t id_bytes, Session** session) {
  *session = nullptr;
  const Library* library = nullptr;
  if (!openssl::Load(&library).ok()) return 0;
  if (id_bytes != sizeof(kIdentity) - 1 || std::memcmp(id, kIdentity, id_bytes) != 0) return 1;
  *session = static_cast<Tls*>(library->get_ex_data(ssl, kAppData))->MakeSession();
  return *session != nullptr ? 1 : 0;
}

Moved Tls::Send(const iovec* pieces, int count) {
  if (failed_.how != Moved::How::kNothing) return failed_;
  if (kernel_ != nullptr) return kernel_->Send(pieces, count);
  // Refused while a record is half sent: then after it.
  if (records_ >= options_.records_per_key &&
      library_.key_update(ssl_, openssl::kKeyUpdateOneWay) == 1) {
    records_ = 0;
  }
  while (count > 0 && pieces->iov_len == 0) {
    ++pieces;
    --count;
  }
  if (count == 0) return {};
  const void* data = pieces->iov_base;
  size_t bytes = std::min(pieces->iov_len, kTlsRecordBytes);
  if (count > 1 && bytes < kTlsRecordBytes) {  // a record for each small piece would be slow
    bytes = 0;
    for (int i = 0; i < count && bytes < kTlsRecordBytes; ++i) {
      const size_t part = std::min(pieces[i].iov_len, kTlsRecordBytes - bytes);
      std::memcpy(record_.data() + bytes, pieces[i].iov_base, part);
      bytes += part;
    }
    data = record_.data();
  }
  Clear();
  const int sent = library_.write(ssl_, data, static_cast<int>(bytes));
  if (sent <= 0) return Judge(sent, "sending to it failed");
  ++records_;
  return {Moved::How::kSome, static_cast<size_t>(sent)};
}

Moved Tls::Receive(const iovec* pieces, int count) {
  if (failed_.how != Moved::How::kNothing) return failed_;
  if (broken_.how == Moved::How::kBroken) return broken_;
  size_t total = 0;
  for (int i = 0; i < count; ++i) {
    auto* data = static_cast<char*>(pieces[i].iov_base);
    size_t left = pieces[i].iov_len;
    while (left > 0) {
      Clear();
      const int got = library_.read(ssl_, data, static_cast<int>(std::min<size_t>(left, 1 << 30)));
      if (got <= 0) {
        const Moved why = Judge(got, "the connection to it broke");
        if (why.how == Moved::How::kBroken) broken_ = why;
        if (total == 0) return why;
        return {Moved::How::kSome, total};  // the next call finds the same
      }
      data += got;
      left -= static_cast<size_t>(got);
      total += static_cast<size_t>(got);
    }
  }
  if (total == 0) return {};
  return {Moved::How::kSome, total};
}

void Tls::EndSending() {
  if (kernel_ == nullptr) return Stream::EndSending();
  ending_ = true;
  (void)Drained();
}

// The kernel keeps a part of a record that found no room in the socket, and drops it when that is
// shut down. So the end waits until the socket is empty; its alert then pushes what was kept.
bool Tls::Drained() {
  if (!Stream::Drained()) return false;
  if (!ending_) return true;
  if (kernel_->Send(Alert::kCloseNotify).how == Moved::How::kNothing) return false;
  ending_ = false;
  Stream::EndSending();
  return Stream::Drained();
}

Moved Tls::Judge(int result, const char* attempt) {
  const int error = library_.get_error(ssl_, result);
  if (error == openssl::kErrorWantRead || error == openssl::kErrorWantWrite) return {};
  if (socket_.error != 0) return {Moved::How::kBroken, 0, ErrnoMessage(attempt, socket_.error)};
  // The end of the stream alone says nothing: whether the peer said goodbye before does.
  if (socket_.ended || error == openssl::kErrorZeroReturn) return {Moved::How::kEnd};
  bool altered = false;
  const std::string reason = Reason(&altered);
  // OpenSSL would have told the peer.
  if (altered && kernel_ != nullptr) (void)kernel_->Send(Alert::kBadRecordMac);
  failed_ = {altered ? Moved::How::kForged : Moved::How::kBroken, 0, reason};
  return failed_;
}

std::string Tls::Reason(bool* altered) {
  const unsigned long first = library_.err_get_error();
  const char* reason = first != 0 ? library_.err_reason_error_string(first) : nullptr;
  for (unsigned long error = first; error != 0; error = library_.err_get_error()) {
    if (altered != nullptr) *altered |= openssl::IsOfAlteredRecord(error);
  }
  return reason != nullptr ? std::string("OpenSSL: ") + reason : "OpenSSL does not say why";
}

}  // namespace

Status TlsStream(UniqueFd fd, const TlsOptions& options, std::unique_ptr<Stream>* out) {
  const Library* library = nullptr;
  if (Status status = openssl::Load(&library); !status.ok()) return status;
  auto made = std::make_unique<Tls>(std::move(fd), options, *library);
  if (Status status = made->Prepare(); !status.ok()) return status;
  if (Status status = made->Handshake(); !status.ok()) return status;
  *out = std::move(made);
  return Status();
}

}  // namespace hetccl::transport::tcp
