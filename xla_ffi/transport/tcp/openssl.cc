#include "xla_ffi/transport/tcp/openssl.h"

#include <dlfcn.h>

#include <algorithm>
#include <iterator>

namespace hetccl::transport::tcp::openssl {
namespace {

constexpr char kAdvice[] =
    "HETCCL_TLS=1 needs OpenSSL 3; Debian: apt-get install libssl3, or set HETCCL_TLS=0 everywhere";

class Binder {
 public:
  Status Open(const std::string& library) {
    library_ = library;
    handle_ = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) return Status();
    const char* reason = ::dlerror();
    return InternalError("no TLS: " + std::string(reason != nullptr ? reason : library.c_str()) +
                         " (" + kAdvice + ")");
  }

  template <typename Function>
  void operator()(Function** function, const char* name) {
    *function = reinterpret_cast<Function*>(::dlsym(handle_, name));
    if (*function == nullptr) missing_ += (missing_.empty() ? "" : ", ") + std::string(name);
  }

  Status Missing() const {
    if (missing_.empty()) return Status();
    return InternalError("no TLS: " + library_ + " lacks " + missing_ + " (" + kAdvice + ")");
  }

 private:
  std::string library_;
  void* handle_ = nullptr;
  std::string missing_;
};

Status BindSsl(const std::string& name, Library* library) {
  Binder bind;
  if (Status status = bind.Open(name); !status.ok()) return status;
  bind(&library->method, "TLS_method");
  bind(&library->ctx_new, "SSL_CTX_new");
  bind(&library->ctx_free, "SSL_CTX_free");
  bind(&library->ctx_ctrl, "SSL_CTX_ctrl");
  bind(&library->ctx_set_ciphersuites, "SSL_CTX_set_ciphersuites");
  bind(&library->ctx_set_num_tickets, "SSL_CTX_set_num_tickets");
  bind(&library->ctx_set_verify, "SSL_CTX_set_verify");
  bind(&library->ctx_set_default_read_buffer_len, "SSL_CTX_set_default_read_buffer_len");
  bind(&library->ctx_set_psk_use_session_callback, "SSL_CTX_set_psk_use_session_callback");
  bind(&library->ctx_set_psk_find_session_callback, "SSL_CTX_set_psk_find_session_callback");
  bind(&library->ctx_set_keylog_callback, "SSL_CTX_set_keylog_callback");
  bind(&library->new_ssl, "SSL_new");
  bind(&library->free, "SSL_free");
  bind(&library->set_bio, "SSL_set_bio");
  bind(&library->set_connect_state, "SSL_set_connect_state");
  bind(&library->set_accept_state, "SSL_set_accept_state");
  bind(&library->set_ex_data, "SSL_set_ex_data");
  bind(&library->get_ex_data, "SSL_get_ex_data");
  bind(&library->do_handshake, "SSL_do_handshake");
  bind(&library->read, "SSL_read");
  bind(&library->write, "SSL_write");
  bind(&library->get_error, "SSL_get_error");
  bind(&library->key_update, "SSL_key_update");
  bind(&library->session_reused, "SSL_session_reused");
  bind(&library->cipher_find, "SSL_CIPHER_find");
  bind(&library->session_new, "SSL_SESSION_new");
  bind(&library->session_free, "SSL_SESSION_free");
  bind(&library->session_set1_master_key, "SSL_SESSION_set1_master_key");
  bind(&library->session_set_cipher, "SSL_SESSION_set_cipher");
  bind(&library->session_set_protocol_version, "SSL_SESSION_set_protocol_version");
  return bind.Missing();
}

Status BindCrypto(const std::string& name, Library* library) {
  Binder bind;
  if (Status status = bind.Open(name); !status.ok()) return status;
  bind(&library->init_crypto, "OPENSSL_init_crypto");
  bind(&library->version, "OpenSSL_version");
  bind(&library->evp_sha256, "EVP_sha256");
  bind(&library->hmac, "HMAC");
  bind(&library->err_clear_error, "ERR_clear_error");
  bind(&library->err_get_error, "ERR_get_error");
  bind(&library->err_reason_error_string, "ERR_reason_error_string");
  bind(&library->bio_get_new_index, "BIO_get_new_index");
  bind(&library->bio_meth_new, "BIO_meth_new");
  bind(&library->bio_meth_set_write, "BIO_meth_set_write");
  bind(&library->bio_meth_set_read, "BIO_meth_set_read");
  bind(&library->bio_meth_set_ctrl, "BIO_meth_set_ctrl");
  bind(&library->bio_new, "BIO_new");
  bind(&library->bio_set_data, "BIO_set_data");
  bind(&library->bio_get_data, "BIO_get_data");
  bind(&library->bio_set_init, "BIO_set_init");
  bind(&library->bio_set_flags, "BIO_set_flags");
  bind(&library->bio_clear_flags, "BIO_clear_flags");
  return bind.Missing();
}

constexpr int kAltered[] = {kBadRecordMac,         kAlertBadRecordMac,      kAlertDecryptError,
                            kBadRecordType,        kAlertUnexpectedMessage, kWrongVersionNumber,
                            kAlertProtocolVersion, kPacketLengthTooLong,    kEncryptedLengthTooLong,
                            kAlertRecordOverflow,  kLengthTooShort,         kAlertDecodeError};

}  // namespace

bool IsOfAlteredRecord(unsigned long error) {
  if ((error & kErrorOfSystem) != 0) return false;
  if ((error >> kErrorLibraryAt & kErrorLibraryMask) != kErrorLibrarySsl) return false;
  const auto reason = static_cast<int>(error & kErrorReasonMask);
  return std::find(std::begin(kAltered), std::end(kAltered), reason) != std::end(kAltered);
}

Status LoadFrom(const std::string& ssl, const std::string& crypto, Library* library) {
  *library = Library();
  if (Status status = BindSsl(ssl, library); !status.ok()) return status;
  if (Status status = BindCrypto(crypto, library); !status.ok()) return status;
  // Threads may still be in it when the process exits. Of no effect where others, such as Python's
  // hashlib, began to use this libcrypto before.
  (void)library->init_crypto(kInitNoAtexit, nullptr);
  return Status();
}

Status Load(const Library** library) {
  static Library loaded;
  static const Status status = LoadFrom("libssl.so.3", "libcrypto.so.3", &loaded);
  *library = &loaded;
  return status;
}

}  // namespace hetccl::transport::tcp::openssl
