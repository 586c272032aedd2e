#include "xla_ffi/transport/rdma/completion_error.h"

#include "xla_ffi/transport/rdma/abi.h"

namespace hetccl::transport::rdma {
namespace {

struct Meaning {
  int status;
  ErrorKind kind;
  const char* text;
};

constexpr Meaning kMeanings[] = {
    {abi::kWcLocalLength, ErrorKind::kInternal,
     "local length error: a message is longer than what was posted for it"},
    {abi::kWcLocalQpOperation, ErrorKind::kInternal,
     "local queue pair operation error: the NIC refused the work request"},
    {abi::kWcLocalProtection, ErrorKind::kInternal,
     "local protection error: this side's memory is not registered as the request says"},
    {abi::kWcFlushed, ErrorKind::kInternal,
     "work request flushed: the queue pair is in the error state; the peer's side, or an event of "
     "the NIC (see the kernel's log), put it there"},
    {abi::kWcBadResponse, ErrorKind::kInternal, "bad response: the peer's NIC answered nonsense"},
    {abi::kWcLocalAccess, ErrorKind::kCorrupt,
     "local access error: the peer wrote to memory that is not registered for it"},
    {abi::kWcRemoteInvalidRequest, ErrorKind::kCorrupt,
     "remote invalid request error: the peer's NIC does not take what was sent"},
    {abi::kWcRemoteAccess, ErrorKind::kCorrupt,
     "remote access error: the key or address is not one of the peer's registered memory"},
    {abi::kWcRemoteOperation, ErrorKind::kInternal,
     "remote operation error: the peer's NIC could not complete the request"},
    {abi::kWcRetryExceeded, ErrorKind::kPeerLost,
     "transport retry counter exceeded: the peer's NIC does not acknowledge; its link is down, a "
     "firewall drops RoCE (UDP port 4791), or its process is gone"},
    {abi::kWcRnrRetryExceeded, ErrorKind::kCorrupt,
     "receiver-not-ready retry counter exceeded: the peer has posted no receive"},
    {abi::kWcRemoteAborted, ErrorKind::kPeerLost, "remote aborted error: the peer gave up"},
    {abi::kWcFatal, ErrorKind::kInternal, "fatal error: the NIC does not work any more"},
    {abi::kWcResponseTimeout, ErrorKind::kPeerLost, "response timeout: the peer does not answer"},
};

}  // namespace

Status CompletionError(int wc_status, uint32_t vendor_error, const std::string& where) {
  ErrorKind kind = ErrorKind::kInternal;
  std::string text = "work completion status " + std::to_string(wc_status);
  for (const Meaning& meaning : kMeanings) {
    if (meaning.status != wc_status) continue;
    kind = meaning.kind;
    text = meaning.text;
  }
  text = where + ": " + text;
  if (vendor_error != 0) text += " (vendor code " + std::to_string(vendor_error) + ")";
  return Status(kind, std::move(text));
}

}  // namespace hetccl::transport::rdma
