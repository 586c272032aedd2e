// Our copy of OpenSSL's constants and signatures against the installed headers, where there are
// any.
#include "xla_ffi/transport/tcp/openssl.h"

#include <gtest/gtest.h>

#include <string>

#if __has_include(<openssl/ssl.h>)
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/ssl.h>

namespace hetccl::transport::tcp::openssl {
namespace {

#define SAME(ours, theirs) \
  static_assert(static_cast<uint64_t>(ours) == static_cast<uint64_t>(theirs), #ours)

SAME(kTls13, TLS1_3_VERSION);
SAME(kVerifyPeer, SSL_VERIFY_PEER);
SAME(kCtrlMode, SSL_CTRL_MODE);
SAME(kCtrlReadAhead, SSL_CTRL_SET_READ_AHEAD);
SAME(kCtrlMinVersion, SSL_CTRL_SET_MIN_PROTO_VERSION);
SAME(kModePartialWrite, SSL_MODE_ENABLE_PARTIAL_WRITE);
SAME(kModeMovingBuffer, SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
SAME(kErrorWantRead, SSL_ERROR_WANT_READ);
SAME(kErrorWantWrite, SSL_ERROR_WANT_WRITE);
SAME(kErrorZeroReturn, SSL_ERROR_ZERO_RETURN);
SAME(kKeyUpdateOneWay, SSL_KEY_UPDATE_NOT_REQUESTED);
SAME(kBioSourceSink, BIO_TYPE_SOURCE_SINK);
SAME(kBioCtrlFlush, BIO_CTRL_FLUSH);
SAME(kBioRead, BIO_FLAGS_READ);
SAME(kBioWrite, BIO_FLAGS_WRITE);
SAME(kBioShouldRetry, BIO_FLAGS_SHOULD_RETRY);
SAME(kBioRetryFlags, BIO_FLAGS_RWS | BIO_FLAGS_SHOULD_RETRY);
SAME(kVersionText, OPENSSL_VERSION);
SAME(kInitNoAtexit, OPENSSL_INIT_NO_ATEXIT);
SAME(kErrorLibrarySsl, ERR_LIB_SSL);
SAME(kErrorLibraryAt, ERR_LIB_OFFSET);
SAME(kErrorLibraryMask, ERR_LIB_MASK);
SAME(kErrorReasonMask, ERR_REASON_MASK);
SAME(kErrorOfSystem, ERR_SYSTEM_FLAG);
SAME(kBadRecordMac, SSL_R_DECRYPTION_FAILED_OR_BAD_RECORD_MAC);
SAME(kAlertBadRecordMac, SSL_R_SSLV3_ALERT_BAD_RECORD_MAC);
SAME(kAlertDecryptError, SSL_R_TLSV1_ALERT_DECRYPT_ERROR);
SAME(kBadRecordType, SSL_R_BAD_RECORD_TYPE);
SAME(kAlertUnexpectedMessage, SSL_R_SSLV3_ALERT_UNEXPECTED_MESSAGE);
SAME(kWrongVersionNumber, SSL_R_WRONG_VERSION_NUMBER);
SAME(kAlertProtocolVersion, SSL_R_TLSV1_ALERT_PROTOCOL_VERSION);
SAME(kPacketLengthTooLong, SSL_R_PACKET_LENGTH_TOO_LONG);
SAME(kEncryptedLengthTooLong, SSL_R_ENCRYPTED_LENGTH_TOO_LONG);
SAME(kAlertRecordOverflow, SSL_R_TLSV1_ALERT_RECORD_OVERFLOW);
SAME(kLengthTooShort, SSL_R_LENGTH_TOO_SHORT);
SAME(kAlertDecodeError, SSL_R_TLSV1_ALERT_DECODE_ERROR);

// Numbers must be of one type, pointers may point to our name for theirs.
template <typename A, typename B>
struct Matches
    : std::bool_constant<std::is_same_v<A, B> || (std::is_pointer_v<A> && std::is_pointer_v<B>)> {};
template <typename R, typename... As, typename S, typename... Bs>
struct Matches<R (*)(As...), S (*)(Bs...)>
    : std::bool_constant<
          sizeof...(As) == sizeof...(Bs) && Matches<R, S>::value &&
          std::is_same_v<std::index_sequence_for<As...>, std::index_sequence_for<Bs...>>> {
  static_assert((Matches<As, Bs>::value && ...));
};

#define SAME_CALL(ours, theirs) \
  static_assert(Matches<decltype(Library::ours), decltype(&theirs)>::value, #ours)

SAME_CALL(method, TLS_method);
SAME_CALL(ctx_new, SSL_CTX_new);
SAME_CALL(ctx_free, SSL_CTX_free);
SAME_CALL(ctx_ctrl, SSL_CTX_ctrl);
SAME_CALL(ctx_set_ciphersuites, SSL_CTX_set_ciphersuites);
SAME_CALL(ctx_set_num_tickets, SSL_CTX_set_num_tickets);
SAME_CALL(ctx_set_verify, SSL_CTX_set_verify);
SAME_CALL(ctx_set_default_read_buffer_len, SSL_CTX_set_default_read_buffer_len);
SAME_CALL(ctx_set_psk_use_session_callback, SSL_CTX_set_psk_use_session_callback);
SAME_CALL(ctx_set_psk_find_session_callback, SSL_CTX_set_psk_find_session_callback);
SAME_CALL(ctx_set_keylog_callback, SSL_CTX_set_keylog_callback);
SAME_CALL(new_ssl, SSL_new);
SAME_CALL(free, SSL_free);
SAME_CALL(set_bio, SSL_set_bio);
SAME_CALL(set_connect_state, SSL_set_connect_state);
SAME_CALL(set_accept_state, SSL_set_accept_state);
SAME_CALL(set_ex_data, SSL_set_ex_data);
SAME_CALL(get_ex_data, SSL_get_ex_data);
SAME_CALL(do_handshake, SSL_do_handshake);
SAME_CALL(read, SSL_read);
SAME_CALL(write, SSL_write);
SAME_CALL(get_error, SSL_get_error);
SAME_CALL(key_update, SSL_key_update);
SAME_CALL(session_reused, SSL_session_reused);
SAME_CALL(cipher_find, SSL_CIPHER_find);
SAME_CALL(session_new, SSL_SESSION_new);
SAME_CALL(session_free, SSL_SESSION_free);
SAME_CALL(session_set1_master_key, SSL_SESSION_set1_master_key);
SAME_CALL(session_set_cipher, SSL_SESSION_set_cipher);
SAME_CALL(session_set_protocol_version, SSL_SESSION_set_protocol_version);
SAME_CALL(init_crypto, OPENSSL_init_crypto);
SAME_CALL(version, OpenSSL_version);
SAME_CALL(evp_sha256, EVP_sha256);
SAME_CALL(hmac, HMAC);
SAME_CALL(err_clear_error, ERR_clear_error);
SAME_CALL(err_get_error, ERR_get_error);
SAME_CALL(err_reason_error_string, ERR_reason_error_string);
SAME_CALL(bio_get_new_index, BIO_get_new_index);
SAME_CALL(bio_meth_new, BIO_meth_new);
SAME_CALL(bio_meth_set_write, BIO_meth_set_write);
SAME_CALL(bio_meth_set_read, BIO_meth_set_read);
SAME_CALL(bio_meth_set_ctrl, BIO_meth_set_ctrl);
SAME_CALL(bio_new, BIO_new);
SAME_CALL(bio_set_data, BIO_set_data);
SAME_CALL(bio_get_data, BIO_get_data);
SAME_CALL(bio_set_init, BIO_set_init);
SAME_CALL(bio_set_flags, BIO_set_flags);
SAME_CALL(bio_clear_flags, BIO_clear_flags);

}  // namespace
}  // namespace hetccl::transport::tcp::openssl
#endif

namespace hetccl::transport::tcp::openssl {
namespace {

TEST(OpenSsl, OnlyErrorsOfRecordsSayThatSomethingWasChanged) {
  const auto of_ssl = [](unsigned long reason) {
    return static_cast<unsigned long>(kErrorLibrarySsl) << kErrorLibraryAt | reason;
  };
  EXPECT_TRUE(IsOfAlteredRecord(of_ssl(kBadRecordMac)));
  EXPECT_TRUE(IsOfAlteredRecord(of_ssl(kAlertBadRecordMac)));
  EXPECT_TRUE(IsOfAlteredRecord(of_ssl(kBadRecordType)));
  EXPECT_FALSE(IsOfAlteredRecord(of_ssl(1080))) << "the peer's internal error";
  EXPECT_FALSE(IsOfAlteredRecord(of_ssl(0xC0100))) << "no memory";
  EXPECT_FALSE(IsOfAlteredRecord(kBadRecordMac)) << "of another library";
  EXPECT_FALSE(IsOfAlteredRecord(kErrorOfSystem | of_ssl(kBadRecordMac))) << "an errno value";
}

TEST(OpenSsl, AMissingLibraryIsNamed) {
  Library library;
  const Status status = LoadFrom("libssl.so.999", "libcrypto.so.3", &library);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("libssl.so.999"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("HETCCL_TLS"), std::string::npos) << status.message();
}

TEST(OpenSsl, SoAreMissingSymbols) {
  Library library;
  const Status status = LoadFrom("libc.so.6", "libc.so.6", &library);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("libc.so.6 lacks TLS_method"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace hetccl::transport::tcp::openssl
