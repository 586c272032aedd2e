// libssl and libcrypto 3, opened when the process runs: neither building nor installing needs them.
#ifndef XLA_FFI_TRANSPORT_TCP_OPENSSL_H_
#define XLA_FFI_TRANSPORT_TCP_OPENSSL_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "xla_ffi/common/status.h"

namespace hetccl::transport::tcp::openssl {

// The libraries' types, none of which this project looks into.
struct Bio;
struct BioMethod;
struct Cipher;
struct Ctx;
struct Digest;
struct Method;
struct Session;
struct Ssl;
struct StoreContext;

// The values of the libraries' macros; openssl_test.cc compares them with the headers.
inline constexpr int kTls13 = 0x0304;
inline constexpr int kVerifyPeer = 1;
inline constexpr int kCtrlMode = 33;
inline constexpr int kCtrlReadAhead = 41;
inline constexpr int kCtrlMinVersion = 123;
inline constexpr long kModePartialWrite = 1;
inline constexpr long kModeMovingBuffer = 2;
inline constexpr int kErrorWantRead = 2;
inline constexpr int kErrorWantWrite = 3;
inline constexpr int kErrorZeroReturn = 6;
inline constexpr int kKeyUpdateOneWay = 0;
inline constexpr int kBioSourceSink = 0x0400;
inline constexpr int kBioCtrlFlush = 11;
inline constexpr int kBioRead = 1;
inline constexpr int kBioWrite = 2;
inline constexpr int kBioShouldRetry = 8;
inline constexpr int kBioRetryFlags = 7 | kBioShouldRetry;
inline constexpr int kVersionText = 0;
inline constexpr uint64_t kInitNoAtexit = 0x00080000;
// An error's library and reason.
inline constexpr int kErrorLibrarySsl = 20;
inline constexpr int kErrorLibraryAt = 23;
inline constexpr unsigned long kErrorLibraryMask = 0xFF;
inline constexpr unsigned long kErrorReasonMask = 0x7FFFFF;
inline constexpr unsigned long kErrorOfSystem = 0x80000000;
// Of a record that does not decrypt, as found here and as the peer's alert tells it; then of one
// whose head, which is looked at first, was changed.
inline constexpr int kBadRecordMac = 281;
inline constexpr int kAlertBadRecordMac = 1020;
inline constexpr int kAlertDecryptError = 1051;
inline constexpr int kBadRecordType = 443;
inline constexpr int kAlertUnexpectedMessage = 1010;
inline constexpr int kWrongVersionNumber = 267;
inline constexpr int kAlertProtocolVersion = 1070;
inline constexpr int kPacketLengthTooLong = 198;
inline constexpr int kEncryptedLengthTooLong = 150;
inline constexpr int kAlertRecordOverflow = 1022;
inline constexpr int kLengthTooShort = 160;
inline constexpr int kAlertDecodeError = 1050;

using UseSession = int (*)(Ssl* ssl, const Digest* digest, const unsigned char** id,
                           size_t* id_bytes, Session** session);
using FindSession = int (*)(Ssl* ssl, const unsigned char* id, size_t id_bytes, Session** session);
using KeepLine = void (*)(const Ssl* ssl, const char* line);

// Function pointers with the names of the libraries, without the SSL_ of the first.
struct Library {
  const Method* (*method)();
  Ctx* (*ctx_new)(const Method* method);
  void (*ctx_free)(Ctx* ctx);
  long (*ctx_ctrl)(Ctx* ctx, int command, long number, void* pointer);
  int (*ctx_set_ciphersuites)(Ctx* ctx, const char* names);
  int (*ctx_set_num_tickets)(Ctx* ctx, size_t count);
  void (*ctx_set_verify)(Ctx* ctx, int mode, int (*callback)(int, StoreContext*));
  void (*ctx_set_default_read_buffer_len)(Ctx* ctx, size_t bytes);
  void (*ctx_set_psk_use_session_callback)(Ctx* ctx, UseSession callback);
  void (*ctx_set_psk_find_session_callback)(Ctx* ctx, FindSession callback);
  void (*ctx_set_keylog_callback)(Ctx* ctx, KeepLine callback);
  Ssl* (*new_ssl)(Ctx* ctx);
  void (*free)(Ssl* ssl);
  void (*set_bio)(Ssl* ssl, Bio* read, Bio* write);
  void (*set_connect_state)(Ssl* ssl);
  void (*set_accept_state)(Ssl* ssl);
  int (*set_ex_data)(Ssl* ssl, int index, void* data);
  void* (*get_ex_data)(const Ssl* ssl, int index);
  int (*do_handshake)(Ssl* ssl);
  int (*read)(Ssl* ssl, void* data, int bytes);
  int (*write)(Ssl* ssl, const void* data, int bytes);
  int (*get_error)(const Ssl* ssl, int result);
  int (*key_update)(Ssl* ssl, int type);
  int (*session_reused)(const Ssl* ssl);
  const Cipher* (*cipher_find)(Ssl* ssl, const unsigned char* id);
  Session* (*session_new)();
  void (*session_free)(Session* session);
  int (*session_set1_master_key)(Session* session, const unsigned char* key, size_t bytes);
  int (*session_set_cipher)(Session* session, const Cipher* cipher);
  int (*session_set_protocol_version)(Session* session, int version);

  int (*init_crypto)(uint64_t options, const void* settings);
  const char* (*version)(int what);
  const Digest* (*evp_sha256)();
  unsigned char* (*hmac)(const Digest* digest, const void* key, int key_bytes,
                         const unsigned char* data, size_t bytes, unsigned char* out,
                         unsigned int* out_bytes);
  void (*err_clear_error)();
  unsigned long (*err_get_error)();
  const char* (*err_reason_error_string)(unsigned long error);
  int (*bio_get_new_index)();
  BioMethod* (*bio_meth_new)(int type, const char* name);
  int (*bio_meth_set_write)(BioMethod* method, int (*write)(Bio*, const char*, int));
  int (*bio_meth_set_read)(BioMethod* method, int (*read)(Bio*, char*, int));
  int (*bio_meth_set_ctrl)(BioMethod* method, long (*ctrl)(Bio*, int, long, void*));
  Bio* (*bio_new)(const BioMethod* method);
  void (*bio_set_data)(Bio* bio, void* data);
  void* (*bio_get_data)(Bio* bio);
  void (*bio_set_init)(Bio* bio, int init);
  void (*bio_set_flags)(Bio* bio, int flags);
  void (*bio_clear_flags)(Bio* bio, int flags);
};

// Whether an error, after the handshake, tells that a record was changed on the way. The others are
// of one of the two ends.
bool IsOfAlteredRecord(unsigned long error);

// Opens the libraries once for the process; later calls return the same answer. The error names the
// library or the symbols that are missing, and what has them.
Status Load(const Library** library);
// The same without remembering, for libraries of these names.
Status LoadFrom(const std::string& ssl, const std::string& crypto, Library* library);

}  // namespace hetccl::transport::tcp::openssl

#endif  // XLA_FFI_TRANSPORT_TCP_OPENSSL_H_
